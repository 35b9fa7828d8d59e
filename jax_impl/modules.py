"""Modules that all layers are made of: linear maps and norms, with parameters as diptych/plans/model/parameters.py
gives them.

Twin of ``reference_torch/modules.py``.
"""

from flax import nnx
from jax import Array
from jaxtyping import Float

from diptych.plans.config import TransformerConfig
from diptych.plans.model.parameters import ParameterSpec, norm_spec
from jax_impl.ops import linear, parameter, rms_norm


class Linear(nnx.Module):
    """A linear map that hands its bias on instead of adding it.

    Args:
        config: the model's.
        name: canonical name.
        specs: shapes of weight and, where there is one, bias.
    """

    def __init__(self, config: TransformerConfig, name: str, specs: dict[str, ParameterSpec]) -> None:
        self.weight = parameter(config, f"{name}.weight", specs["weight"])
        self.bias = parameter(config, f"{name}.bias", specs["bias"]) if "bias" in specs else None

    def __call__(self, x: Float[Array, "b t i"]) -> tuple[Float[Array, "b t o"], Array | None]:
        """x @ weight.T [B, T, O], and the bias [O] or None that the caller still has to add."""
        return linear(x, self.weight[...]), _value(self.bias)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with a gain.

    Args:
        config: the model's.
        name: canonical name.
        specs: shape of the gain, where it is not as wide as the model.
    """

    def __init__(self, config: TransformerConfig, name: str, specs: dict[str, ParameterSpec] | None = None) -> None:
        self.epsilon = config.layernorm_epsilon
        self.weight = parameter(config, f"{name}.weight", (specs or norm_spec(config))["weight"])

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """See ops.rms_norm."""
        return rms_norm(x, self.weight[...], self.epsilon)


def _value(bias: nnx.Param | None) -> Array | None:
    """The array of a bias that may be absent."""
    return None if bias is None else bias[...]
