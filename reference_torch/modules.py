"""Modules that all layers are made of: linear maps and norms, with parameters as diptych/plans/model/parameters.py
gives them.

Twin of ``jax_impl/modules.py``.
"""

from jaxtyping import Float
from torch import Tensor, nn

from diptych.plans.config import TransformerConfig
from diptych.plans.model.parameters import ParameterSpec, norm_spec
from reference_torch.ops import linear, parameter, rms_norm


class Linear(nn.Module):
    """A linear map that hands its bias on instead of adding it.

    Args:
        config: the model's.
        name: canonical name.
        specs: shapes of weight and, where there is one, bias.
    """

    def __init__(self, config: TransformerConfig, name: str, specs: dict[str, ParameterSpec]) -> None:
        super().__init__()
        self.weight = parameter(config, f"{name}.weight", specs["weight"])
        self.bias = parameter(config, f"{name}.bias", specs["bias"]) if "bias" in specs else None

    def forward(self, x: Float[Tensor, "b t i"]) -> tuple[Float[Tensor, "b t o"], Tensor | None]:
        """x @ weight.T [B, T, O], and the bias [O] or None that the caller still has to add."""
        return linear(x, self.weight), self.bias


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a gain.

    Args:
        config: the model's.
        name: canonical name.
        specs: shape of the gain, where it is not as wide as the model.
    """

    def __init__(self, config: TransformerConfig, name: str, specs: dict[str, ParameterSpec] | None = None) -> None:
        super().__init__()
        self.epsilon = config.layernorm_epsilon
        self.weight = parameter(config, f"{name}.weight", (specs or norm_spec(config))["weight"])

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """See ops.rms_norm."""
        return rms_norm(x, self.weight, self.epsilon)
