"""The feed-forward sublayer of a layer: an MLP, or a mixture of experts that sends every token to some of them.

A router scores the experts for each token, and the token's output is the weighted sum of the outputs of its experts
with the highest scores. No token is dropped: pairs of a token and an expert are sorted by expert, and each expert
computes all of its pairs. Mirrors ``jax_impl/mlp.py``.

Reference: Shazeer et al., arXiv 1701.06538; DeepSeek-AI, arXiv 2412.19437, section 2.1.2, for sigmoid scores, the bias
and the shared expert; arXiv 2405.04434, section 2.2, for groups.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diptych.plans.config import TransformerConfig
from diptych.plans.context.sequences import FLACPContext
from diptych.plans.model.parameters import ParameterSpec, mlp_specs
from reference_torch.activation_storage import packed_activation
from reference_torch.aux_loss import divided_by_sum, token_aux_loss
from reference_torch.documents import PackedDocuments
from reference_torch.modules import Linear
from reference_torch.ops import add_bias, at_least_float32, gelu, linear, parameter, swiglu
from reference_torch.recompute import SAVE_ALL, BlockRecomputation, name_value


class MLP(nn.Module):
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
        super().__init__()
        specs = mlp_specs(config, layer_number) if specs is None else specs
        self.activate = activation_function(config, layer_number)
        self.impl = config.impl
        self.linear_fc1 = Linear(config, f"{name}.linear_fc1", specs["linear_fc1"])
        self.linear_fc2 = Linear(config, f"{name}.linear_fc2", specs["linear_fc2"])

    @property
    def output_bias(self) -> Tensor | None:
        """The bias [D] of the second layer, which the caller adds."""
        return self.linear_fc2.bias

    def forward(
        self, hidden_states: Float[Tensor, "b t d"], recompute: BlockRecomputation = SAVE_ALL, tp_size: int = 1
    ) -> Float[Tensor, "b t d"]:
        """Return the output without the bias of the second layer.

        Args:
            hidden_states: input. [B, T, D]
            recompute: values to drop after forward.
            tp_size: number of ranks that add up their outputs; has no effect.

        Returns:
            [B, T, D]
        """
        inner = name_value(self.linear_fc1.with_bias(hidden_states), "fc1")
        activated = recompute("activation", self.activate, inner, self.impl)
        del inner  # which may be saved in 8 bits only
        return self.linear_fc2(name_value(activated, "activation"))[0]


def activation_function(config: TransformerConfig, layer_number: int) -> Callable[..., Tensor]:
    """Return the activation function of a layer's MLPs, which may save its input in 8 bits."""
    layer = config.layer(layer_number)
    function = swiglu if layer.activation == "swiglu" else gelu
    return function if layer.storage is None else partial(packed_activation, function)


def choose_experts(
    scores: Float[Tensor, "n e"],
    topk: int,
    bias: Float[Tensor, " e"] | None = None,
    groups: int | None = None,
    group_topk: int | None = None,
) -> Int[Tensor, "n k"]:
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
    scores = scores.detach()
    scores = scores if bias is None else scores + bias.detach()
    if groups is not None and group_topk is not None:
        grouped = scores.unflatten(1, (groups, -1))
        best = _highest(grouped.sort(-1, descending=True).values[..., :2].sum(-1), group_topk)
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
        scores = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    return _highest(scores, topk)


def _highest(scores: Tensor, count: int) -> Tensor:
    """Return the indices [N, count] of the highest scores of each row, the first ones among equals."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count].contiguous()


class Router(nn.Module):
    """The choice of each token's experts and of their weights.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
        specs: shapes of the weight and of the bias of the choice, if there is one.
    """

    def __init__(self, config: TransformerConfig, name: str, specs: dict[str, ParameterSpec]) -> None:
        super().__init__()
        self.config = config
        self.weight = parameter(config, f"{name}.weight", specs["weight"])
        biased = "expert_bias" in specs
        self.expert_bias = parameter(config, f"{name}.expert_bias", specs["expert_bias"]) if biased else None

    def scores(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
        """Return the scores [N, E] of all experts for tokens x [N, D], in at least float32."""
        logits = linear(at_least_float32(x), self.weight)
        return logits.softmax(-1) if self.config.moe_router_score_function == "softmax" else logits.sigmoid()

    def choose(self, scores: Float[Tensor, "n e"]) -> Int[Tensor, "n k"]:
        """Return the indices [N, k] of each token's experts."""
        config = self.config
        groups = config.moe_router_num_groups, config.moe_router_group_topk
        return choose_experts(scores, config.moe_router_topk, self.expert_bias, *groups)

    def forward(self, x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Return the weights and the indices of each token's experts, [N, k] each."""
        config = self.config
        scores = self.scores(x)
        chosen = self.choose(scores)
        weights = scores.gather(1, chosen)
        if config.moe_router_norm_topk_prob:
            weights = divided_by_sum(weights)
        weights = weights * config.moe_router_topk_scaling_factor
        if self.expert_bias is not None:
            everywhere = torch.ones_like(self.expert_bias, dtype=torch.bool)
            weights = weights + self.expert_bias.masked_fill(everywhere, 0.0)[chosen]  # it has a gradient, which is 0
        return weights, chosen


class Experts(nn.Module):
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
        super().__init__()
        self.activate = activation_function(config, layer_number)
        self.impl = config.impl
        self.linear_fc1 = Linear(config, f"{name}.linear_fc1", specs["experts.linear_fc1"])
        self.linear_fc2 = Linear(config, f"{name}.linear_fc2", specs["experts.linear_fc2"])

    def forward(
        self,
        x: Float[Tensor, "n d"],
        weights: Float[Tensor, "n k"],
        chosen: Int[Tensor, "n k"],
        recompute: BlockRecomputation = SAVE_ALL,
    ) -> Float[Tensor, "n d"]:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            x: tokens. [N, D]
            weights: weights of each token's experts. [N, k]
            chosen: indices of each token's experts. [N, k]
            recompute: values to drop after forward.

        Returns:
            [N, D]
        """
        count = chosen.shape[1]
        by_expert = chosen.flatten().argsort(stable=True)
        sizes = torch.bincount(chosen.flatten(), minlength=len(self.linear_fc1.weight)).tolist()
        inner = self.linear_fc1.by_groups(x.repeat_interleave(count, 0)[by_expert], sizes)
        activated = recompute("activation", self.activate, name_value(inner, "fc1"), self.impl)
        del inner  # which may be saved in 8 bits only
        outputs = self.linear_fc2.by_groups(name_value(activated, "activation"), sizes)
        del activated
        weighted = outputs * weights.flatten()[by_expert][:, None].to(outputs.dtype)
        return weighted[by_expert.argsort()].unflatten(0, (-1, count)).sum(1)


class MixtureOfExperts(nn.Module):
    """A router, its experts and, if configured, a shared expert with or without a gate.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str) -> None:
        super().__init__()
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

    def forward(
        self, hidden_states: Float[Tensor, "b t d"], recompute: BlockRecomputation = SAVE_ALL, tp_size: int = 1
    ) -> Float[Tensor, "b t d"]:
        """Return the output.

        Args:
            hidden_states: input. [B, T, D]
            recompute: values to drop after forward.
            tp_size: number of ranks that add up their outputs, each with an equal share of the biases.

        Returns:
            [B, T, D]
        """
        x = hidden_states.flatten(0, 1)
        output = self.experts(x, *self.router(x), recompute).view_as(hidden_states)
        if self.shared_experts is None:
            return output
        bias = self.shared_experts.output_bias
        bias = bias if bias is None or tp_size == 1 else bias / tp_size
        shared = add_bias(self.shared_experts(hidden_states, recompute), bias)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(add_bias(*self.shared_expert_gate(hidden_states))) * shared
        return output + shared

    def aux_loss(
        self, hidden_states: Float[Tensor, "b t d"], sequences: PackedDocuments | FLACPContext | None
    ) -> Float[Tensor, "b t"]:
        """Return the load-balancing loss of each token [B, T]; see aux_loss.token_aux_loss.

        Args:
            hidden_states: input of the mixture. [B, T, D]
            sequences: see ForwardContext.
        """
        scores = self.router.scores(hidden_states.flatten(0, 1))
        return token_aux_loss(scores, self.router.choose(scores), len(hidden_states), sequences)
