"""Linear maps and norms, with parameters initialised by diptych/plans/model/parameters.py.

Mirrors ``jax_impl/modules.py``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from diptych.plans.amax_history import NAME
from diptych.plans.config import TransformerConfig
from diptych.plans.fp8 import ProductRecipe, linear_recipe
from diptych.plans.model.parameters import ParameterSpec, norm_spec, with_history
from reference_torch.amax_history import delayed_scales, observe
from reference_torch.fp8 import ALONE, SharingRanks, fp8_linear
from reference_torch.grouped_fp8 import fp8_grouped_linear
from reference_torch.ops import add_bias, grouped_linear, linear, parameter
from reference_torch.tensor_parallel import WHOLE, TensorParallel


class Linear(nn.Module):
    """A linear map that returns its bias instead of adding it.

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
        history = with_history(config, name, specs).get(NAME)
        self.amax_history = None if history is None else parameter(config, f"{name}.{NAME}", history)
        self.gradient_factor = 1
        """See set_gradient_factor."""
        self.sharing_ranks = ALONE
        """See set_sharing_ranks."""

    def forward(self, x: Float[Tensor, "b t i"]) -> tuple[Float[Tensor, "b t o"], Tensor | None]:
        """Return x @ weight.T [B, T, O] and the bias [O] or None, which the caller adds."""
        return linear(x, self.weight) if self.fp8 is None else self._in_fp8(x, self.fp8), self.bias

    def with_bias(self, x: Float[Tensor, "b t i"]) -> Float[Tensor, "b t o"]:
        """Return x @ weight.T + bias [B, T, O], as one operation if that has no FP8 product."""
        return linear(x, self.weight, self.bias) if self.fp8 is None else add_bias(*self(x))

    def by_groups(self, x: Float[Tensor, "m i"], sizes: Sequence[int]) -> Float[Tensor, "m o"]:
        """Multiply consecutive rows by the matrix of their group, weight [E, O, I]; see ops.grouped_linear."""
        if self.fp8 is None:
            return grouped_linear(x, self.weight, sizes)
        return self._in_fp8(x, self.fp8, partial(_fp8_by_groups, sizes))

    def _in_fp8(
        self, x: Float[Tensor, "*b i"], recipe: ProductRecipe, product: Callable[..., Tensor] = fp8_linear
    ) -> Float[Tensor, "*b o"]:
        """Return the product with the weight by products of 8-bit floats."""
        history = self.amax_history
        if history is None:
            return product(x, self.weight, recipe, ranks=self.sharing_ranks)
        y = product(x, self.weight, recipe, delayed_scales(history, recipe, self.gradient_factor))
        return observe(y, x, self.weight, history, self.gradient_factor)


def _fp8_by_groups(sizes: Sequence[int], x: Tensor, weight: Tensor, *how: Any, **ranks: Any) -> Tensor:
    """Call fp8_grouped_linear with the arguments of fp8_linear, and sizes."""
    return fp8_grouped_linear(x, weight, sizes, *how, **ranks)


def set_gradient_factor(module: nn.Module, factor: int) -> None:
    """Tell the linear maps of a module by how much the gradients of backward are larger than those of a step's loss."""
    for each in module.modules():
        if isinstance(each, Linear):
            each.gradient_factor = factor


def set_sharing_ranks(module: nn.Module, ranks: SharingRanks) -> None:
    """Tell the linear maps of a module which ranks have other parts of their arrays."""
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
        self.epsilon = epsilon or config.layernorm_epsilon
        spec = (specs or norm_spec(config))["weight"]
        self.offset = spec.offset
        self.weight = parameter(config, f"{name}.weight", spec)

    def forward(self, x: Float[Tensor, "*b d"], channels: TensorParallel = WHOLE) -> Float[Tensor, "*b d"]:
        """Call ops.rms_norm, or with ranks that share the channels TensorParallel.joint_norm."""
        weight = self.weight + self.offset if self.offset else self.weight
        return channels.joint_norm(x, weight, self.epsilon)
