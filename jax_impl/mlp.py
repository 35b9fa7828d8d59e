"""The feed-forward sublayer of a layer: an MLP, or a mixture of experts that sends every token to some of them.

A router scores the experts for each token, and the token's output is the weighted sum of the outputs of its experts
with the highest scores. No token is dropped: pairs of a token and an expert are sorted by expert, and each expert
computes all of its pairs. Mirrors ``reference_torch/mlp.py``.

Reference: Shazeer et al., arXiv 1701.06538; DeepSeek-AI, arXiv 2412.19437, section 2.1.2, for sigmoid scores, the bias
and the shared expert; arXiv 2405.04434, section 2.2, for groups.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from diptych.plans.config import TransformerConfig
from diptych.plans.context.sequences import FLACPContext
from diptych.plans.model.parameters import ParameterSpec, mlp_specs
from jax_impl.activation_storage import packed_activation
from jax_impl.aux_loss import divided_by_sum, token_aux_loss
from jax_impl.documents import PackedDocuments
from jax_impl.modules import Linear
from jax_impl.ops import add_bias, at_least_float32, gelu, linear, parameter, swiglu
from jax_impl.recompute import name_value


class MLP(nnx.Module):
    """Two linear layers around an activation function.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module.
        specs: parameters by submodule; None: those of the layer's MLP.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        name: str,
        specs: Mapping[str, dict[str, ParameterSpec]] | None = None,
    ) -> None:
        specs = mlp_specs(config, layer_number) if specs is None else specs
        self.activate = activation_function(config, layer_number)
        self.impl = config.impl
        self.linear_fc1 = Linear(config, f"{name}.linear_fc1", specs["linear_fc1"])
        self.linear_fc2 = Linear(config, f"{name}.linear_fc2", specs["linear_fc2"])

    @property
    def output_bias(self) -> Array | None:
        """The bias [D] of the second layer, which the caller adds."""
        return None if self.linear_fc2.bias is None else self.linear_fc2.bias[...]

    def __call__(self, hidden_states: Float[Array, "b t d"], tp_size: int = 1) -> Float[Array, "b t d"]:
        """Return the output without the bias of the second layer.

        Args:
            hidden_states: input. [B, T, D]
            tp_size: number of ranks that add up their outputs; has no effect.

        Returns:
            [B, T, D]
        """
        inner = name_value(self.linear_fc1.with_bias(hidden_states), "fc1")
        activated = self.activate(inner, self.impl)
        return self.linear_fc2(name_value(activated, "activation"))[0]


def activation_function(config: TransformerConfig, layer_number: int) -> Callable[..., Array]:
    """Return the activation function of a layer's MLPs, which may save its input in 8 bits."""
    layer = config.layer(layer_number)
    function = swiglu if layer.activation == "swiglu" else gelu
    return function if layer.storage is None else partial(packed_activation, function)


def choose_experts(
    scores: Float[Array, "n e"],
    topk: int,
    bias: Float[Array, " e"] | None = None,
    groups: int | None = None,
    group_topk: int | None = None,
) -> Int[Array, "n k"]:
    """Return the experts of each token: those with the highest scores, the first ones among equals.

    Args:
        scores: scores of the experts. [N, E]
        topk: experts of a token.
        bias: added to the scores; None: 0. [E]
        groups: number of groups of consecutive experts; None: one.
        group_topk: groups whose experts a token may have, by the sum of the two highest scores of each; None: all.

    Returns:
        Indices of the experts, by falling score. [N, topk]
    """
    scores = jax.lax.stop_gradient(scores)
    scores = scores if bias is None else scores + jax.lax.stop_gradient(bias)
    if groups is not None and group_topk is not None:
        grouped = scores.reshape(len(scores), groups, -1)
        best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), group_topk)[1]
        allowed = (best[..., None] == jnp.arange(groups)).any(1)
        scores = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, topk)[1]


class Router(nnx.Module):
    """The choice of each token's experts and of their weights.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
        specs: shapes of the weight and of the bias of the choice, if there is one.
    """

    def __init__(self, config: TransformerConfig, name: str, specs: dict[str, ParameterSpec]) -> None:
        self.config = config
        self.weight = parameter(config, f"{name}.weight", specs["weight"])
        biased = "expert_bias" in specs
        self.expert_bias = parameter(config, f"{name}.expert_bias", specs["expert_bias"]) if biased else None

    def scores(self, x: Float[Array, "n d"]) -> Float[Array, "n e"]:
        """Return the scores [N, E] of all experts for tokens x [N, D], in at least float32."""
        logits = linear(at_least_float32(x), self.weight[...])
        return jax.nn.softmax(logits) if self.config.moe_router_score_function == "softmax" else nnx.sigmoid(logits)

    def choose(self, scores: Float[Array, "n e"]) -> Int[Array, "n k"]:
        """Return the indices [N, k] of each token's experts."""
        config = self.config
        groups = config.moe_router_num_groups, config.moe_router_group_topk
        bias = None if self.expert_bias is None else self.expert_bias[...]
        return choose_experts(scores, config.moe_router_topk, bias, *groups)

    def __call__(self, x: Float[Array, "n d"]) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
        """Return the weights and the indices of each token's experts, [N, k] each."""
        config = self.config
        scores = self.scores(x)
        chosen = self.choose(scores)
        weights = jnp.take_along_axis(scores, chosen, 1)
        if config.moe_router_norm_topk_prob:
            weights = divided_by_sum(weights)
        return weights * config.moe_router_topk_scaling_factor, chosen


class Experts(nnx.Module):
    """MLPs of equal size, whose weights are one array for each layer: [E, O, I].

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module.
        specs: parameters of the layer's mixture of experts, by submodule.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        name: str,
        specs: Mapping[str, dict[str, ParameterSpec]],
    ) -> None:
        self.activate = activation_function(config, layer_number)
        self.impl = config.impl
        self.linear_fc1 = Linear(config, f"{name}.linear_fc1", specs["experts.linear_fc1"])
        self.linear_fc2 = Linear(config, f"{name}.linear_fc2", specs["experts.linear_fc2"])

    def __call__(
        self,
        x: Float[Array, "n d"],
        weights: Float[Array, "n k"],
        chosen: Int[Array, "n k"],
    ) -> Float[Array, "n d"]:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            x: tokens. [N, D]
            weights: weights of each token's experts. [N, k]
            chosen: indices of each token's experts. [N, k]

        Returns:
            [N, D]
        """
        count = chosen.shape[1]
        by_expert = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = (chosen.reshape(-1, 1) == jnp.arange(len(self.linear_fc1.weight[...]))).sum(0)
        rows = jnp.repeat(x, count, 0)[by_expert]
        inner = name_value(self.linear_fc1.by_groups(rows, sizes), "fc1")
        activated = self.activate(inner, self.impl)
        outputs = self.linear_fc2.by_groups(name_value(activated, "activation"), sizes)
        weighted = outputs * weights.reshape(-1)[by_expert][:, None].astype(outputs.dtype)
        return weighted[jnp.argsort(by_expert)].reshape(*chosen.shape, -1).sum(1)


class MixtureOfExperts(nnx.Module):
    """A router, its experts and, if configured, a shared expert with or without a gate.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str) -> None:
        specs = mlp_specs(config, layer_number)
        self.router = Router(config, f"{name}.router", specs["router"])
        self.experts = Experts(config, layer_number, f"{name}.experts", specs)
        prefix = "shared_experts."
        shared = {key.removeprefix(prefix): spec for key, spec in specs.items() if key.startswith(prefix)}
        self.shared_experts = MLP(config, layer_number, f"{name}.shared_experts", shared) if shared else None
        gate = specs.get("shared_expert_gate")
        self.shared_expert_gate = Linear(config, f"{name}.shared_expert_gate", gate) if gate else None

    @property
    def output_bias(self) -> None:
        """None, because the output already includes the bias of the shared expert."""
        return None

    def __call__(self, hidden_states: Float[Array, "b t d"], tp_size: int = 1) -> Float[Array, "b t d"]:
        """Return the output.

        Args:
            hidden_states: input. [B, T, D]
            tp_size: number of ranks that add up their outputs, each with an equal share of the biases.

        Returns:
            [B, T, D]
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = self.experts(x, *self.router(x)).reshape(hidden_states.shape)
        if self.shared_experts is None:
            return output
        bias = self.shared_experts.output_bias
        bias = bias if bias is None or tp_size == 1 else bias / tp_size
        shared = add_bias(self.shared_experts(hidden_states), bias)
        if self.shared_expert_gate is not None:
            shared = nnx.sigmoid(add_bias(*self.shared_expert_gate(hidden_states))) * shared
        return output + shared

    def aux_loss(
        self, hidden_states: Float[Array, "b t d"], sequences: PackedDocuments | FLACPContext | None
    ) -> Float[Array, "b t"]:
        """Return the load-balancing loss of each token [B, T]; see aux_loss.token_aux_loss.

        Args:
            hidden_states: input of the mixture. [B, T, D]
            sequences: see ForwardContext.
        """
        scores = self.router.scores(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return token_aux_loss(scores, self.router.choose(scores), len(hidden_states), sequences)
