"""Manifold-constrained hyper-connections (mHC): S residual streams instead of one.

For residual streams x [B, T, S, D], with r = 1 / rms of a token's S*D numbers:

    h          = r * (x_flat @ phi) * alpha + bias      phi [S*D, S*S + 2*S], alpha: one gain a group
    h_pre      = sigmoid(h[:S])                          reads the streams: aggregated = h_pre . x
    h_post     = 2 sigmoid(h[S:2S])                      writes a sublayer's output to the streams
    h_res      = sinkhorn(h[2S:])                        mixes the streams, doubly stochastic
    x_next     = h_res @ x + dropout(h_post * (y + b))   y, b: output and bias of the sublayer

Doubly stochastic matrices are closed under products and never amplify, so a deep product of h_res
neither explodes nor dies. Coefficients are float32 (float64 for float64 streams) whatever the type of
x; tokens lie innermost in everything S x S, so that each of the 2 * iterations normalisations is one
vectorised sweep; the mixing steps are batched matrix products that read the streams once.

Reference: mHC, arXiv 2512.24880, eqs. 3-9. Layout is batch first, [B, T, S, D].
"""

from collections import deque
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diptych.plans.config import TransformerConfig
from diptych.plans.model import operations
from diptych.plans.model.parameters import SINKHORN_FLOOR, hyper_connection_spec
from reference_torch.operands import at_least_float32, given_operand, operand
from reference_torch.ops import DropoutState, add_bias, check_state, dropout, kernel_backend, parameter
from reference_torch.recompute import MHCBlockRecomputeManager, name_value


def sinkhorn(
    logits: Float[Tensor, "*b s s"], iterations: int = 20, last: str = "row", impl: str = "auto"
) -> Float[Tensor, "*b s s"]:
    """Doubly stochastic matrices: exp(logits), normalised along rows and columns in turn.

    The backward pass replays the iterates from the logits and differentiates every one of them;
    nothing but the logits is kept for it.

    Args:
        logits: iterated in float32 if narrower. [..., S, S]
        iterations: pairs of normalisations, >= 1.
        last: ``"row"`` (the paper: columns first, row sums exact) or ``"column"``.
        impl: see diptych.plans.model.implementation.

    Raises:
        ValueError: names the argument, what was expected, what came.

    Reference: mHC, eq. 9. The first normalisation is a softmax, kept from underflow by a floor of
    1e-30 (entries below it count as constants); no later sum can then vanish, so there is no epsilon and
    the last side is exact.
    """
    operations.check_iterations(iterations, last)
    operations.check_matrices(operand("logits", logits))
    if kernels := kernel_backend(impl, logits):
        return kernels.sinkhorn(logits, iterations, last)
    tokens_innermost = at_least_float32(logits).movedim((-2, -1), (0, 1))
    first_axis = 0 if last == "row" else 1  # summing over axis 0, the row index, normalises columns
    return _Sinkhorn.apply(tokens_innermost, iterations, first_axis).movedim((0, 1), (-2, -1)).to(logits.dtype)


class _Sinkhorn(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(logits, iterations, first_axis):  # [S, S, ...]
        matrix, _ = deque(_iterates(logits, iterations, first_axis), maxlen=1).pop()
        return matrix

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, ctx.iterations, ctx.first_axis = inputs
        ctx.save_for_backward(logits)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (logits,) = ctx.saved_tensors
        iterates = list(_iterates(logits, ctx.iterations, ctx.first_axis))
        axis = 1 - ctx.first_axis
        for matrix, total in reversed(iterates[1:]):
            grad = (grad - (grad * matrix).sum(axis, keepdim=True)) / total
            axis = 1 - axis
        softmax, _ = iterates[0]
        grad = grad.where(softmax > SINKHORN_FLOOR, 0.0)
        return softmax * (grad - (grad * softmax).sum(axis, keepdim=True)), None, None


def _iterates(logits: Tensor, iterations: int, first_axis: int):
    """Each normalised matrix with the sums it was divided by (None for the softmax)."""
    axis = first_axis
    matrix = logits.softmax(axis).clamp(min=SINKHORN_FLOOR)
    yield matrix, None
    for _ in range(2 * iterations - 1):
        axis = 1 - axis
        total = matrix.sum(axis, keepdim=True)
        matrix = matrix / total
        yield matrix, total


def compute_mappings(
    x: Float[Tensor, "b t s d"],
    phi: Float[Tensor, "sd c"],
    alpha: Float[Tensor, "3"],
    bias: Float[Tensor, " c"],
    *,
    iterations: int = 20,
    last: str = "row",
    epsilon: float = 1e-5,
    impl: str = "auto",
) -> tuple[Float[Tensor, "b t s"], Float[Tensor, "b t s"], Float[Tensor, "b t s s"]]:
    """The three coefficient tensors of every token.

    Args:
        x: residual streams. [B, T, S, D]
        phi: projection. [S*D, 2*S + S*S]
        alpha: gains of h_pre, h_post, h_res. [3]
        bias: [2*S + S*S]
        iterations, last: see sinkhorn.
        epsilon: added to the mean square.
        impl: see diptych.plans.model.implementation.

    Returns:
        h_pre [B, T, S] in (0, 1), h_post [B, T, S] in (0, 2), h_res [B, T, S, S] doubly stochastic;
        float32, or float64 for float64 streams.

    Reference: mHC, eqs. 5-8; the division by rms follows the projection.
    """
    operations.check_iterations(iterations, last)
    parameters = operand("phi", phi), operand("alpha", alpha), operand("bias", bias)
    operations.check_mappings(operand("x", x), *parameters, epsilon)
    if kernels := kernel_backend(impl, x):
        h_pre, h_post, h_res = kernels.compute_mappings(
            x, phi, alpha, bias, iterations=iterations, last=last, epsilon=epsilon
        )
        return name_value(h_pre, "h_pre"), name_value(h_post, "h_post"), name_value(h_res, "h_res")
    batch, length, streams, _ = x.shape
    x_flat = x.flatten(0, 1).flatten(1)  # [N, S*D]
    projected = at_least_float32(phi.t().to(x.dtype) @ x_flat.t())  # [2*S + S*S, N]
    norm = torch.linalg.vector_norm(x_flat, dim=-1, dtype=projected.dtype)
    inverse_rms = (norm * norm / x_flat.shape[-1] + epsilon).rsqrt()
    groups = (streams, streams, streams * streams)
    gain = torch.cat([a.expand(size) for a, size in zip(alpha, groups, strict=True)])
    h = projected * inverse_rms * gain[:, None] + bias[:, None]
    h_pre, h_post, h_res = h.split(groups)
    h_pre, h_post = h_pre.sigmoid(), 2 * h_post.sigmoid()
    h_res = sinkhorn(h_res.view(streams, streams, -1).permute(2, 0, 1), iterations, last, impl)
    shape = (batch, length, streams)  # contiguous: bmm takes strided matrices one at a time
    return (
        name_value(h_pre.t().contiguous().view(shape), "h_pre"),
        name_value(h_post.t().contiguous().view(shape), "h_post"),
        name_value(h_res.contiguous().view(*shape, streams), "h_res"),
    )


def aggregate(x: Float[Tensor, "b t s d"], h_pre: Float[Tensor, "b t s"], impl: str = "auto") -> Float[Tensor, "b t d"]:
    """What a sublayer reads: sum over streams of h_pre[s] * x[s]. Reference: mHC, eq. 3."""
    operations.check_aggregate(operand("x", x), operand("h_pre", h_pre))
    if kernels := kernel_backend(impl, x):
        return name_value(kernels.aggregate(x, h_pre), "aggregated")
    batch, length, streams, _ = x.shape
    weights = h_pre.to(x.dtype).reshape(-1, 1, streams)
    return name_value(torch.bmm(weights, x.flatten(0, 1)).view(batch, length, -1), "aggregated")


def apply_h_res(
    h_res: Float[Tensor, "b t s s"], residual: Float[Tensor, "b t s d"], impl: str = "auto"
) -> Float[Tensor, "b t s d"]:
    """The streams mixed: mixed[s] = sum over j of h_res[s, j] * residual[j]. Reference: mHC, eq. 3."""
    operations.check_mix(operand("h_res", h_res), operand("residual", residual))
    if kernels := kernel_backend(impl, residual):
        return name_value(kernels.apply_h_res(h_res, residual), "mixed")
    mixed = torch.bmm(h_res.to(residual.dtype).flatten(0, 1), residual.flatten(0, 1))
    return name_value(mixed.view_as(residual), "mixed")


def apply_h_post(
    x: Float[Tensor, "b t d"], bias: Float[Tensor, " d"] | None, h_post: Float[Tensor, "b t s"], impl: str = "auto"
) -> Float[Tensor, "b t s d"]:
    """A sublayer's output written to every stream: expanded[s] = h_post[s] * (x + bias)."""
    operations.check_expanded(operand("x", x), given_operand("bias", bias), operand("h_post", h_post))
    if kernels := kernel_backend(impl, x):
        return name_value(kernels.apply_h_post(x, bias, h_post), "expanded")
    y = add_bias(x, bias)
    return name_value(h_post.to(x.dtype)[..., None] * y[..., None, :], "expanded")


def write_streams(
    residual: Float[Tensor, "b t s d"],
    h_res: Float[Tensor, "b t s s"] | None,
    x: Float[Tensor, "b t d"],
    bias: Float[Tensor, " d"] | None,
    h_post: Float[Tensor, "b t s"],
    rate: float = 0.0,
    state: DropoutState | None = None,
    site: int = 0,
    impl: str = "auto",
) -> Float[Tensor, "b t s d"]:
    """The next residual streams: ``h_res @ residual + dropout(h_post * (x + bias))``; kernels do it in one pass.

    Args:
        residual: [B, T, S, D]
        h_res: doubly stochastic, or None where residual is mixed already. [B, T, S, S]
        x: output of a sublayer. [B, T, D]
        bias: [D] or None.
        h_post: [B, T, S]
        rate: of dropout, in [0, 1).
        state: rows of the batch, or None for no dropout, as in evaluation.
        site: see ops.dropout.
        impl: see diptych.plans.model.implementation.

    Reference: mHC, eq. 3, with dropout on what is added.
    """
    arrays = operand("residual", residual), given_operand("h_res", h_res), operand("x", x)
    operations.check_written(*arrays, given_operand("bias", bias), operand("h_post", h_post), rate)
    if state is not None:
        check_state(tuple(x.shape[:2]), state, site)
    if kernels := kernel_backend(impl, x):
        return kernels.write_streams(residual, h_res, x, bias, h_post, rate, state, site)
    mixed = residual if h_res is None else apply_h_res(h_res, residual, impl="reference")
    if state is not None and rate > 0.0:
        return mixed + dropout(apply_h_post(x, bias, h_post, impl="reference"), rate, state, site)
    y = add_bias(x, bias)
    weights = h_post.to(x.dtype).flatten(0, 1)[..., None]
    return torch.baddbmm(mixed.flatten(0, 1), weights, y.flatten(0, 1)[:, None]).view_as(mixed)


class DeferredMix(NamedTuple):
    """Mixed streams that write_streams computes when it adds to them: one pass over the streams less."""

    h_res: Float[Tensor, "b t s s"]
    residual: Float[Tensor, "b t s d"]


class HyperConnectionModule(nn.Module):
    """The hyper-connection around one sublayer: owns phi, alpha and bias.

    Args:
        config: the model's.
        layer_number: global number of the layer, from 0.
        name: canonical name of the module, which with config.seed fixes its initial values; None:
            ``hyper_connection.<layer_number>``.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str | None = None) -> None:
        super().__init__()
        self.config, self.layer_number = config, layer_number
        name, specs = name or f"hyper_connection.{layer_number}", hyper_connection_spec(config)
        self.phi = parameter(config, f"{name}.phi", specs["phi"])
        self.alpha = parameter(config, f"{name}.alpha", specs["alpha"])
        self.bias = parameter(config, f"{name}.bias", specs["bias"])

    def forward(
        self,
        hidden_states: Float[Tensor, "b t s d"],
        residual: Float[Tensor, "b t s d"],
        training: bool = True,
        mhc_recompute_manager: MHCBlockRecomputeManager | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t s d"], Float[Tensor, "b t s"]]:
        """What the sublayer reads, the mixed residual, and how to write the sublayer's output.

        Args:
            hidden_states: residual streams the coefficients and the aggregate are taken from. [B, T, S, D]
            residual: streams that are mixed; in a transformer the same tensor. [B, T, S, D]
            training: accepted for symmetry with other modules; nothing here depends on it.
            mhc_recompute_manager: drops everything returned after forward and computes it again in backward.

        Returns:
            aggregated [B, T, D], mixed [B, T, S, D], h_post [B, T, S].
        """
        if mhc_recompute_manager is not None:
            return mhc_recompute_manager.checkpoint(self.forward, hidden_states, residual, training)
        h_pre, h_post, h_res = self.compute_mappings(hidden_states)
        return self.aggregate(hidden_states, h_pre), self.apply_h_res(h_res, residual), h_post

    def read(
        self,
        hidden_states: Float[Tensor, "b t s d"],
        mhc_recompute_manager: MHCBlockRecomputeManager | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t s d"] | DeferredMix, Float[Tensor, "b t s"]]:
        """As forward with hidden_states as residual; where kernels compute, they mix when they write.

        Args:
            hidden_states: residual streams. [B, T, S, D]
            mhc_recompute_manager: see forward.

        Returns:
            aggregated [B, T, D], mixed [B, T, S, D] or what it is to be computed from, h_post [B, T, S].
        """
        if kernel_backend(self.config.impl, hidden_states) is None:
            return self(hidden_states, hidden_states, mhc_recompute_manager=mhc_recompute_manager)
        if mhc_recompute_manager is None:
            aggregated, h_res, h_post = self._aggregate_mappings(hidden_states)
        else:
            aggregated, h_res, h_post = mhc_recompute_manager.checkpoint(self._aggregate_mappings, hidden_states)
        return aggregated, DeferredMix(h_res, hidden_states), h_post

    def _aggregate_mappings(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h_pre, h_post, h_res = self.compute_mappings(x)
        return self.aggregate(x, h_pre), h_res, h_post

    def compute_mappings(self, x: Float[Tensor, "b t s d"]) -> tuple[Tensor, Tensor, Tensor]:
        """h_pre [B, T, S], h_post [B, T, S], h_res [B, T, S, S] of the streams x."""
        return compute_mappings(
            x,
            self.phi,
            self.alpha,
            self.bias,
            iterations=self.config.sinkhorn_iterations,
            last=self.config.sinkhorn_last,
            epsilon=self.config.layernorm_epsilon,
            impl=self.config.impl,
        )

    def aggregate(self, x: Float[Tensor, "b t s d"], h_pre: Float[Tensor, "b t s"]) -> Tensor:
        """See the function aggregate."""
        return aggregate(x, h_pre, self.config.impl)

    def apply_h_res(self, h_res: Float[Tensor, "b t s s"], residual: Float[Tensor, "b t s d"]) -> Tensor:
        """See the function apply_h_res."""
        return apply_h_res(h_res, residual, self.config.impl)

    def apply_h_post(
        self, x_with_bias: tuple[Tensor, Tensor | None], h_post: Float[Tensor, "b t s"]
    ) -> tuple[Tensor, None]:
        """Expanded output [B, T, S, D]; its bias is consumed, hence the None."""
        x, bias = x_with_bias
        return apply_h_post(x, bias, h_post, self.config.impl), None

    def apply_h_post_with_checkpoint(
        self,
        x_with_bias: tuple[Tensor, Tensor | None],
        h_post: Float[Tensor, "b t s"],
        manager: MHCBlockRecomputeManager | None = None,
    ) -> tuple[Tensor, None]:
        """apply_h_post, recomputed in backward if a manager is given."""
        if manager is None:
            return self.apply_h_post(x_with_bias, h_post)
        return manager.checkpoint(self.apply_h_post, x_with_bias, h_post)

    def apply_h_post_dropout_add(
        self,
        x_with_bias: tuple[Tensor, Tensor | None],
        h_post: Float[Tensor, "b t s"],
        mixed: Float[Tensor, "b t s d"] | DeferredMix,
        state: DropoutState | None,
        site: int,
    ) -> Float[Tensor, "b t s d"]:
        """The next residual streams: ``mixed + dropout(expanded)``.

        Args:
            x_with_bias: output of the sublayer [B, T, D] and its bias [D] or None.
            h_post, mixed: from forward or read.
            state: rows of the batch, or None for no dropout, as in evaluation.
            site: see ops.dropout.
        """
        x, bias = x_with_bias
        h_res, residual = mixed if isinstance(mixed, DeferredMix) else (None, mixed)
        rate, impl = self.config.hidden_dropout, self.config.impl
        return write_streams(residual, h_res, x, bias, h_post, rate, state, site, impl)

    @staticmethod
    def input_expand(x: Float[Tensor, "b t d"], n: int) -> Float[Tensor, "b t n d"]:
        """Copy the input of a transformer block to n streams."""
        return x.unsqueeze(-2).repeat(1, 1, n, 1)

    @staticmethod
    def output_contract(x: Float[Tensor, "b t n d"], n: int) -> Float[Tensor, "b t d"]:
        """Mean of the n streams, the output of a transformer block.

        Raises:
            ValueError: x does not have n streams.
        """
        if x.shape[-2] != n:
            raise ValueError(f"n: expected the number of streams of x, {x.shape[-2]}, got {n}")
        return x.mean(-2)
