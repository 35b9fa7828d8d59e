"""Linear layers and norms, with parameters initialised by diptych/plans/model/parameters.py.

Mirrors ``reference_torch/modules.py``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from diptych.plans.activation_storage import saved_input
from diptych.plans.amax_history import NAME
from diptych.plans.config import TransformerConfig
from diptych.plans.fp8 import ProductRecipe, linear_recipe
from diptych.plans.model.parameters import ParameterSpec, norm_spec, with_history
from jax_impl.activation_storage import PackedProducts, packed_for_backward, packed_grouped_linear
from jax_impl.amax_history import delayed_scales, observe
from jax_impl.fp8 import ALONE, Fp8Products, SharingRanks, fp8_linear
from jax_impl.grouped_fp8 import fp8_grouped_linear
from jax_impl.linear_products import LinearProducts, multiply
from jax_impl.ops import add_bias, grouped_linear, linear, parameter
from jax_impl.tensor_parallel import UNSHARDED, TensorParallel


class Linear(nnx.Module):
    """A linear layer that returns its bias instead of adding it.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
        specs: shapes of the weight and of the bias, if there is one.
    """

    def __init__(self, config: TransformerConfig, name: str, specs: dict[str, ParameterSpec]) -> None:
        self.weight = parameter(config, f"{name}.weight", specs["weight"])
        self.bias = parameter(config, f"{name}.bias", specs["bias"]) if "bias" in specs else None
        self.fp8 = linear_recipe(config, name)
        self.saved_as = saved_input(config, name)
        """Name of the packed input that is saved for backward, or None if it is not saved in 8 bits."""
        history = with_history(config, name, specs).get(NAME)
        self.amax_history = None if history is None else parameter(config, f"{name}.{NAME}", history)
        self.gradient_factor = 1
        """See set_gradient_factor."""
        self.sharing_ranks = ALONE
        """See set_sharing_ranks."""

    def __call__(
        self, x: Float[Array, "b t i"], packed: Array | None = None
    ) -> tuple[Float[Array, "b t o"], Array | None]:
        """Return x @ weight.T [B, T, O] and the bias [O] or None, which the caller adds.

        Args:
            x: input. [B, T, I]
            packed: x as ``pack`` has returned it for another layer of the same input.
        """
        weight = self.weight[...]
        if self.saved_as is not None:
            return self._packed(x, weight, self.pack(x) if packed is None else packed), _value(self.bias)
        return linear(x, weight) if self.fp8 is None else self._in_fp8(x, weight, self.fp8), _value(self.bias)

    def with_bias(self, x: Float[Array, "b t i"], packed: Array | None = None) -> Float[Array, "b t o"]:
        """Return x @ weight.T + bias [B, T, O]."""
        return add_bias(*self(x, packed))

    def pack(self, x: Float[Array, "*b i"]) -> Array | None:
        """Return the input packed for backward, or None if it is not saved in 8 bits; see activation_storage."""
        return packed_for_backward(x, self.saved_as)

    def _packed(self, x: Float[Array, "b t i"], weight: Array, packed: Array | None) -> Float[Array, "b t o"]:
        """Return x @ weight.T [B, T, O], whose backward reads the input in 8 bits."""
        if self.fp8 is None:
            return multiply(PackedProducts(LinearProducts()), x, weight, packed=packed)

        def product(x: Array, weight: Array, recipe: ProductRecipe, scales: Any = None, ranks: Any = ALONE) -> Array:
            return multiply(PackedProducts(Fp8Products(recipe, ranks)), x, weight, scales, packed)

        return self._in_fp8(x, weight, self.fp8, product)

    def by_groups(self, x: Float[Array, "m i"], sizes: Int[Array, " e"]) -> Float[Array, "m o"]:
        """Multiply consecutive rows by the matrix of their group, weight [E, O, I]; see ops.grouped_linear."""
        weight = self.weight[...]
        packed = self.pack(x)
        if self.fp8 is None:
            return (
                grouped_linear(x, weight, sizes) if packed is None else packed_grouped_linear(x, weight, sizes, packed)
            )
        by_groups = _fp8_by_groups if packed is None else partial(_packed_by_groups, packed)
        return self._in_fp8(x, weight, self.fp8, partial(by_groups, sizes))

    def _in_fp8(
        self, x: Float[Array, "*b i"], weight: Array, recipe: ProductRecipe, product: Callable[..., Array] = fp8_linear
    ) -> Float[Array, "*b o"]:
        """Return the product with the weight by matrix products of 8-bit floats."""
        if self.amax_history is None:
            return product(x, weight, recipe, ranks=self.sharing_ranks)
        history = self.amax_history[...]
        y = product(x, weight, recipe, delayed_scales(history, recipe, self.gradient_factor))
        return observe(y, x, weight, history, self.gradient_factor)


def _fp8_by_groups(sizes: Array, x: Array, weight: Array, *how: Any, **ranks: Any) -> Array:
    """Call fp8_grouped_linear with the arguments of fp8_linear, and sizes."""
    return fp8_grouped_linear(x, weight, sizes, *how, **ranks)


def _packed_by_groups(packed: Array, sizes: Array, x: Array, weight: Array, *how: Any, **ranks: Any) -> Array:
    """Call packed_grouped_linear with the arguments of fp8_linear, packed rows and sizes."""
    return packed_grouped_linear(x, weight, sizes, packed, *how, **ranks)


def set_gradient_factor(module: nnx.Module, factor: int) -> None:
    """Set the factor by which the gradients of backward exceed the gradients of a step's loss, in all linear layers."""
    for _, each in nnx.iter_graph(module):
        if isinstance(each, Linear):
            each.gradient_factor = factor


def set_sharing_ranks(module: nnx.Module, ranks: SharingRanks) -> None:
    """Set the ranks that have other parts of the arrays, in all FP8 linear layers of a module."""
    for _, each in nnx.iter_graph(module):
        if isinstance(each, Linear) and each.fp8 is not None:
            each.sharing_ranks = ranks


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with a gain: the weight plus the offset of its specification.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
        specs: shape of the gain; None: as wide as the model.
        epsilon: added to the mean square; None: config.layernorm_epsilon.
    """

    def __init__(
        self,
        config: TransformerConfig,
        name: str,
        specs: dict[str, ParameterSpec] | None = None,
        epsilon: float | None = None,
    ) -> None:
        self.epsilon = config.layernorm_epsilon if epsilon is None else epsilon
        spec = (specs or norm_spec(config))["weight"]
        self.offset = spec.offset
        self.weight = parameter(config, f"{name}.weight", spec)

    def __call__(self, x: Float[Array, "*b d"], channels: TensorParallel = UNSHARDED) -> Float[Array, "*b d"]:
        """Call ops.rms_norm, or TensorParallel.joint_norm if ranks share the channels."""
        weight = self.weight[...]
        return channels.joint_norm(x, weight + self.offset if self.offset else weight, self.epsilon)


def _value(bias: nnx.Param | None) -> Array | None:
    """Return the array of a bias, or None if there is none."""
    return None if bias is None else bias[...]
