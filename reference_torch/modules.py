"""Linear layers and norms, with parameters initialised by diptych/plans/model/parameters.py.

Mirrors ``jax_impl/modules.py``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from diptych.plans.activation_storage import saved_input
from diptych.plans.amax_history import NAME
from diptych.plans.config import TransformerConfig
from diptych.plans.fp8 import ProductRecipe, linear_recipe
from diptych.plans.model.parameters import ParameterSpec, norm_spec, with_history
from reference_torch.activation_storage import PlainProducts, packed_for_backward, packed_grouped_linear, packed_linear
from reference_torch.amax_history import delayed_scales, observe
from reference_torch.fp8 import ALONE, Fp8Products, SharingRanks, fp8_linear
from reference_torch.grouped_fp8 import fp8_grouped_linear
from reference_torch.ops import add_bias, grouped_linear, linear, parameter
from reference_torch.tensor_parallel import UNSHARDED, TensorParallel


class Linear(nn.Module):
    """A linear layer that returns its bias instead of adding it.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
        specs: shapes of the weight and of the bias, if there is one.
    """

    def __init__(self, config: TransformerConfig, name: str, specs: dict[str, ParameterSpec]) -> None:
        super().__init__()
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

    def forward(
        self, x: Float[Tensor, "b t i"], packed: Tensor | None = None
    ) -> tuple[Float[Tensor, "b t o"], Tensor | None]:
        """Return x @ weight.T [B, T, O] and the bias [O] or None, which the caller adds.

        Args:
            x: input. [B, T, I]
            packed: x as ``pack`` has returned it for another layer of the same input.
        """
        if self.saved_as is not None:
            return self._packed(x, self.pack(x) if packed is None else packed), self.bias
        return linear(x, self.weight) if self.fp8 is None else self._in_fp8(x, self.fp8), self.bias

    def with_bias(self, x: Float[Tensor, "b t i"], packed: Tensor | None = None) -> Float[Tensor, "b t o"]:
        """Return x @ weight.T + bias [B, T, O], as one operation if nothing is quantised or packed."""
        is_plain = self.fp8 is None and self.saved_as is None
        return linear(x, self.weight, self.bias) if is_plain else add_bias(*self(x, packed))

    def pack(self, x: Float[Tensor, "*b i"]) -> Tensor | None:
        """Return the input packed for backward, or None if it is not saved in 8 bits; see activation_storage."""
        return packed_for_backward(x, self.saved_as)

    def _packed(self, x: Float[Tensor, "b t i"], packed: Tensor | None) -> Float[Tensor, "b t o"]:
        """Return x @ weight.T [B, T, O], whose backward reads the input in 8 bits."""
        if self.fp8 is None:
            return packed_linear(x, self.weight.to(x.dtype), packed, PlainProducts())

        def product(x: Tensor, weight: Tensor, recipe: ProductRecipe, scales: Any = None, ranks: Any = ALONE) -> Tensor:
            return packed_linear(x, weight, packed, Fp8Products(recipe, weight.dtype, scales, ranks))

        return self._in_fp8(x, self.fp8, product)

    def by_groups(self, x: Float[Tensor, "m i"], sizes: Sequence[int]) -> Float[Tensor, "m o"]:
        """Multiply consecutive rows by the matrix of their group, weight [E, O, I]; see ops.grouped_linear."""
        if self.saved_as is not None:
            packed = self.pack(x)
            if self.fp8 is None:
                return packed_grouped_linear(x, self.weight.to(x.dtype), sizes, packed)
            return self._in_fp8(x, self.fp8, partial(_packed_by_groups, sizes, packed))
        if self.fp8 is None:
            return grouped_linear(x, self.weight, sizes)
        return self._in_fp8(x, self.fp8, partial(_fp8_by_groups, sizes))

    def _in_fp8(
        self, x: Float[Tensor, "*b i"], recipe: ProductRecipe, product: Callable[..., Tensor] = fp8_linear
    ) -> Float[Tensor, "*b o"]:
        """Return x times the weight, computed by matrix products of 8-bit floats."""
        history = self.amax_history
        if history is None:
            return product(x, self.weight, recipe, ranks=self.sharing_ranks)
        y = product(x, self.weight, recipe, delayed_scales(history, recipe, self.gradient_factor))
        return observe(y, x, self.weight, history, self.gradient_factor)


def _fp8_by_groups(sizes: Sequence[int], x: Tensor, weight: Tensor, *how: Any, **ranks: Any) -> Tensor:
    """Call fp8_grouped_linear with the arguments of fp8_linear, and sizes."""
    return fp8_grouped_linear(x, weight, sizes, *how, **ranks)


def _packed_by_groups(
    sizes: Sequence[int], packed: Tensor | None, x: Tensor, weight: Tensor, *how: Any, **ranks: Any
) -> Tensor:
    """Call packed_grouped_linear with the arguments of fp8_linear, sizes and packed rows."""
    return packed_grouped_linear(x, weight, sizes, packed, *how, **ranks)


def set_gradient_factor(module: nn.Module, factor: int) -> None:
    """Set the factor by which the gradients of backward exceed the gradients of a step's loss, in all linear layers."""
    for each in module.modules():
        if isinstance(each, Linear):
            each.gradient_factor = factor


def set_sharing_ranks(module: nn.Module, ranks: SharingRanks) -> None:
    """Set the ranks that have other parts of the arrays, in all FP8 linear layers of a module."""
    for each in module.modules():
        if isinstance(each, Linear) and each.fp8 is not None:
            each.sharing_ranks = ranks


class RMSNorm(nn.Module):
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
        super().__init__()
        self.epsilon = config.layernorm_epsilon if epsilon is None else epsilon
        spec = (specs or norm_spec(config))["weight"]
        self.offset = spec.offset
        self.weight = parameter(config, f"{name}.weight", spec)

    def forward(self, x: Float[Tensor, "*b d"], channels: TensorParallel = UNSHARDED) -> Float[Tensor, "*b d"]:
        """Call ops.rms_norm, or TensorParallel.joint_norm if ranks share the channels."""
        weight = self.weight + self.offset if self.offset else self.weight
        return channels.joint_norm(x, weight, self.epsilon)
