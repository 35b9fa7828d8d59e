"""Manifold-constrained hyper-connections (mHC): S residual streams instead of one.

For residual streams x [B, T, S, D], with r = 1 / rms of the S*D elements of a token:

    h          = r * (x_flat @ phi) * alpha + bias      phi [S*D, S*S + 2*S], alpha: one gain per group
    h_pre      = sigmoid(h[:S])                          reads the streams: aggregated = h_pre . x
    h_post     = 2 sigmoid(h[S:2S])                      writes the output of a sublayer to the streams
    h_res      = sinkhorn(h[2S:])                        mixes the streams, doubly stochastic
    x_next     = h_res @ x + dropout(h_post * (output + b))     output of the sublayer, and b its bias

A product of doubly stochastic matrices is doubly stochastic, and such matrices do not amplify. So a deep product of
h_res neither explodes nor vanishes. Coefficients are float32 for every type of x (float64 for float64). The token axis
is the innermost of all S x S arrays (doubly_stochastic.py). The streams are mixed by batched matrix products, which
read the streams once.

Reference: mHC, arXiv 2512.24880, eqs. 3-9. Layout is batch first, [B, T, S, D].
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diptych.plans.config import TransformerConfig
from diptych.plans.model import operations
from diptych.plans.model.parameters import hyper_connection_head_spec, hyper_connection_spec
from reference_torch.autograd import as_one_operation
from reference_torch.doubly_stochastic import sinkhorn
from reference_torch.operands import at_least_float32, given_operand, operand
from reference_torch.ops import DropoutState, add_bias, check_state, dropout, kernel_backend, parameter
from reference_torch.recompute import MHCBlockRecomputeManager, name_value


@as_one_operation
def compute_mappings(
    x: Float[Tensor, "b t s d"],
    phi: Float[Tensor, "sd c"],
    alpha: Float[Tensor, "3"],
    bias: Float[Tensor, " c"],
    *,
    iterations: int = 20,
    last: str = "row",
    rms_epsilon: float = 1e-5,
    mhc_epsilon: float = 0.0,
    transposed: bool = False,
    impl: str = "auto",
) -> tuple[Float[Tensor, "b t s"], Float[Tensor, "b t s"], Float[Tensor, "b t s s"]]:
    """Return the coefficients h_pre, h_post and h_res of every token.

    Args:
        x: residual streams. [B, T, S, D]
        phi: projection. [S*D, 2*S + S*S]
        alpha: gains of h_pre, h_post, h_res. [3]
        bias: bias of the projection. [2*S + S*S]
        iterations: see sinkhorn.
        last: see sinkhorn.
        rms_epsilon: added to the mean square.
        mhc_epsilon: added to h_pre, and in sinkhorn.
        transposed: the last S*S columns of phi give the transpose of h_res.
        impl: see diptych.plans.model.implementation.

    Returns:
        h_pre [B, T, S] in (0, 1), h_post [B, T, S] in (0, 2), h_res [B, T, S, S] doubly stochastic; float32, or
        float64 for float64 streams.

    Raises:
        ValueError: an argument has a wrong shape, type or value.

    Reference: mHC, eqs. 5-8. Here the division by rms comes after the projection.
    """
    operations.check_iterations(iterations, last)
    parameters = operand("phi", phi), operand("alpha", alpha), operand("bias", bias)
    operations.check_mappings(operand("x", x), *parameters, rms_epsilon, mhc_epsilon)
    if kernels := kernel_backend(impl, x):
        options = dict(iterations=iterations, last=last, mhc_epsilon=mhc_epsilon, transposed=transposed)
        h_pre, h_post, h_res = kernels.compute_mappings(x, phi, alpha, bias, rms_epsilon=rms_epsilon, **options)
        return name_value(h_pre, "h_pre"), name_value(h_post, "h_post"), name_value(h_res, "h_res")
    batch, length, streams, _ = x.shape
    groups = (streams, streams, streams * streams)
    gain = torch.cat([a.expand(size) for a, size in zip(alpha, groups, strict=True)])
    h = (_project(x, phi, rms_epsilon) * gain + bias).t().contiguous()
    h_pre, h_post, h_res = h.split(groups)
    h_pre = h_pre.sigmoid()
    h_pre = h_pre + mhc_epsilon if mhc_epsilon else h_pre
    h_post = 2 * h_post.sigmoid()
    order = (2, 1, 0) if transposed else (2, 0, 1)
    h_res = sinkhorn(h_res.view(streams, streams, -1).permute(order), iterations, last, impl, mhc_epsilon)
    shape = (batch, length, streams)  # contiguous results, because bmm processes strided matrices one by one
    return (
        name_value(h_pre.t().contiguous().view(shape), "h_pre"),
        name_value(h_post.t().contiguous().view(shape), "h_post"),
        name_value(h_res.contiguous().view(*shape, streams), "h_res"),
    )


def _project(x: Tensor, phi: Tensor, epsilon: float) -> Tensor:
    """Return the projection of every token's streams [B, T, S, D], divided by their root mean square. [B*T, C]."""
    return _Projection.apply(x.flatten(0, 1).flatten(1), phi, epsilon)


class _Projection(torch.autograd.Function):
    """x [N, K] @ phi [K, C], each row divided by the root mean square of its x; saves its arguments and its result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, phi, epsilon):
        return at_least_float32(x @ phi.to(x.dtype)) * _inverse_rms(x, epsilon)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, phi, ctx.epsilon = inputs
        ctx.save_for_backward(x, phi, output)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, phi, normalized = ctx.saved_tensors
        inverse = _inverse_rms(x, ctx.epsilon)
        of_squares = (grad * normalized).sum(-1, keepdim=True) * inverse * inverse / -x.shape[-1]
        of_product = (grad * inverse).to(x.dtype)
        grad_x = x * of_squares.to(x.dtype)
        return grad_x.addmm_(of_product, phi.to(x.dtype).t()), (of_product.t() @ x).t().to(phi.dtype), None


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """Return 1 / rms of each row of x [N, K], in at least float32, as [N, 1]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    return (norm * norm / x.shape[-1] + epsilon).rsqrt()


@as_one_operation
def contract_streams(
    x: Float[Tensor, "b t s d"],
    phi: Float[Tensor, "sd s"],
    alpha: Float[Tensor, "1"],
    bias: Float[Tensor, " s"],
    *,
    rms_epsilon: float = 1e-5,
    mhc_epsilon: float = 0.0,
    impl: str = "auto",
) -> Float[Tensor, "b t d"]:
    """Return the hidden states after the last layer as a learned sum of the streams.

    The weights are ``sigmoid(r * (x_flat @ phi) * alpha + bias) + mhc_epsilon``, as those of h_pre.

    Args:
        x: residual streams. [B, T, S, D]
        phi: projection. [S*D, S]
        alpha: gain. [1]
        bias: bias of the projection. [S]
        rms_epsilon: added to the mean square.
        mhc_epsilon: added to the weights.
        impl: see diptych.plans.model.implementation.

    Returns:
        The weighted sum in the type of x. [B, T, D]

    Raises:
        ValueError: an argument has a wrong shape, type or value.

    Reference: the class DeepseekV4HyperHead of transformers 5.23.
    """
    parameters = operand("phi", phi), operand("alpha", alpha), operand("bias", bias)
    operations.check_mappings(operand("x", x), *parameters, rms_epsilon, mhc_epsilon, is_head=True)
    weights = (_project(x, phi, rms_epsilon) * alpha + bias).sigmoid()
    weights = weights + mhc_epsilon if mhc_epsilon else weights
    return aggregate(x, weights.view(x.shape[:3]), impl)


@as_one_operation
def aggregate(x: Float[Tensor, "b t s d"], h_pre: Float[Tensor, "b t s"], impl: str = "auto") -> Float[Tensor, "b t d"]:
    """Return the input of a sublayer: aggregated = sum over s of h_pre[s] * x[s].

    Args:
        x: residual streams. [B, T, S, D]
        h_pre: weights of the streams. [B, T, S]
        impl: see diptych.plans.model.implementation.

    Returns:
        The weighted sum in the type of x. [B, T, D]

    Raises:
        ValueError: an argument has a wrong shape or type.

    Reference: mHC, eq. 3.
    """
    operations.check_aggregate(operand("x", x), operand("h_pre", h_pre))
    if kernels := kernel_backend(impl, x):
        return name_value(kernels.aggregate(x, h_pre), "aggregated")
    batch, length, streams, _ = x.shape
    weights = h_pre.to(x.dtype).reshape(-1, 1, streams)
    return name_value(torch.bmm(weights, x.flatten(0, 1)).view(batch, length, -1), "aggregated")


@as_one_operation
def read_streams(
    x: Float[Tensor, "b t s d"],
    phi: Float[Tensor, "sd c"],
    alpha: Float[Tensor, "3"],
    bias: Float[Tensor, " c"],
    *,
    iterations: int = 20,
    last: str = "row",
    rms_epsilon: float = 1e-5,
    mhc_epsilon: float = 0.0,
    transposed: bool = False,
    merge_residual_gradient: bool = True,
    impl: str = "auto",
) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t s"], Float[Tensor, "b t s s"], Float[Tensor, "b t s d"]]:
    """Return the input of a sublayer, h_post and h_res for write_streams, and x as its residual.

    With Triton kernels, the gradient of x is written once if write_streams gets the returned x. The results are those
    of compute_mappings and aggregate. The returned x shares the memory of x and must not be changed in place.

    Args:
        x: residual streams. [B, T, S, D]
        phi: see compute_mappings, as for the other arguments.
        alpha: gains of h_pre, h_post, h_res. [3]
        bias: bias of the projection. [2*S + S*S]
        iterations: see sinkhorn.
        last: see sinkhorn.
        rms_epsilon: added to the mean square.
        mhc_epsilon: added to h_pre, and in sinkhorn.
        transposed: the last S*S columns of phi give the transpose of h_res.
        merge_residual_gradient: True: write the gradient of x once, with that of the returned x; False: return x
            itself, and the framework adds the two gradients. Results are bitwise equal.
        impl: see diptych.plans.model.implementation.

    Returns:
        aggregated [B, T, D], h_post [B, T, S], h_res [B, T, S, S], x [B, T, S, D].

    Raises:
        ValueError: an argument has a wrong shape, type or value.

    Reference: mHC, eqs. 3-8.
    """
    options: dict[str, Any] = dict(
        iterations=iterations, last=last, rms_epsilon=rms_epsilon, mhc_epsilon=mhc_epsilon, transposed=transposed
    )
    kernels = kernel_backend(impl, x)
    if kernels is None:
        h_pre, h_post, h_res = compute_mappings(x, phi, alpha, bias, **options, impl=impl)
        return aggregate(x, h_pre, impl), h_post, h_res, x
    operations.check_iterations(iterations, last)
    parameters = operand("phi", phi), operand("alpha", alpha), operand("bias", bias)
    operations.check_mappings(operand("x", x), *parameters, rms_epsilon, mhc_epsilon)
    aggregated, h_post, h_res, x = kernels.read_streams(
        x, phi, alpha, bias, **options, merge_residual_gradient=merge_residual_gradient
    )
    return name_value(aggregated, "aggregated"), name_value(h_post, "h_post"), name_value(h_res, "h_res"), x


@as_one_operation
def apply_h_res(
    h_res: Float[Tensor, "b t s s"], residual: Float[Tensor, "b t s d"], impl: str = "auto"
) -> Float[Tensor, "b t s d"]:
    """Mix the streams: mixed[s] = sum over j of h_res[s, j] * residual[j].

    Args:
        h_res: mixing matrices. [B, T, S, S]
        residual: residual streams. [B, T, S, D]
        impl: see diptych.plans.model.implementation.

    Returns:
        The mixed streams in the type of residual. [B, T, S, D]

    Raises:
        ValueError: an argument has a wrong shape or type.

    Reference: mHC, eq. 3.
    """
    operations.check_mix(operand("h_res", h_res), operand("residual", residual))
    if kernels := kernel_backend(impl, residual):
        return name_value(kernels.apply_h_res(h_res, residual), "mixed")
    mixed = torch.bmm(h_res.to(residual.dtype).flatten(0, 1), residual.flatten(0, 1))
    return name_value(mixed.view_as(residual), "mixed")


@as_one_operation
def apply_h_post(
    output: Float[Tensor, "b t d"], bias: Float[Tensor, " d"] | None, h_post: Float[Tensor, "b t s"], impl: str = "auto"
) -> Float[Tensor, "b t s d"]:
    """Expand the output of a sublayer to the streams: expanded[s] = h_post[s] * (output + bias).

    Args:
        output: output of a sublayer. [B, T, D]
        bias: bias of the sublayer, [D], or None.
        h_post: weights of the streams. [B, T, S]
        impl: see diptych.plans.model.implementation.

    Returns:
        The expanded output in the type of output. [B, T, S, D]

    Raises:
        ValueError: an argument has a wrong shape or type.

    Reference: mHC, eq. 3.
    """
    operations.check_expanded(operand("output", output), given_operand("bias", bias), operand("h_post", h_post))
    if kernels := kernel_backend(impl, output):
        return name_value(kernels.apply_h_post(output, bias, h_post), "expanded")
    y = add_bias(output, bias)
    return name_value(h_post.to(output.dtype)[..., None] * y[..., None, :], "expanded")


@as_one_operation
def write_streams(
    residual: Float[Tensor, "b t s d"],
    h_res: Float[Tensor, "b t s s"] | None,
    output: Float[Tensor, "b t d"],
    bias: Float[Tensor, " d"] | None,
    h_post: Float[Tensor, "b t s"],
    rate: float = 0.0,
    state: DropoutState | None = None,
    site: int = 0,
    impl: str = "auto",
) -> Float[Tensor, "b t s d"]:
    """Return the next residual streams: ``h_res @ residual + dropout(h_post * (output + bias))``.

    The Triton kernels compute this in one pass over the streams.

    Args:
        residual: residual streams. [B, T, S, D]
        h_res: mixing matrices, [B, T, S, S], or None if residual is mixed already.
        output: output of a sublayer. [B, T, D]
        bias: bias of the sublayer, [D], or None.
        h_post: weights of the streams. [B, T, S]
        rate: probability of dropout, in [0, 1).
        state: dropout state of the batch; None: no dropout.
        site: see ops.dropout.
        impl: see diptych.plans.model.implementation.

    Returns:
        The next residual streams in the type of residual. [B, T, S, D]

    Raises:
        ValueError: an argument has a wrong shape, type or value.

    Reference: mHC, eq. 3. Dropout on the expanded output is an addition of this project.
    """
    arrays = operand("residual", residual), given_operand("h_res", h_res), operand("output", output)
    operations.check_written(*arrays, given_operand("bias", bias), operand("h_post", h_post), rate)
    if state is not None:
        check_state(tuple(output.shape[:2]), state, site)
    if kernels := kernel_backend(impl, output):
        return kernels.write_streams(residual, h_res, output, bias, h_post, rate, state, site)
    mixed = residual if h_res is None else apply_h_res(h_res, residual, impl="reference")
    if state is not None and rate > 0.0:
        return mixed + dropout(apply_h_post(output, bias, h_post, impl="reference"), rate, state, site)
    y = add_bias(output, bias)
    weights = h_post.to(output.dtype).flatten(0, 1)[..., None]
    return torch.baddbmm(mixed.flatten(0, 1), weights, y.flatten(0, 1)[:, None]).view_as(mixed)


class DeferredMix(NamedTuple):
    """The operands of mixed streams, which write_streams computes: this saves one pass over the streams."""

    h_res: Float[Tensor, "b t s s"]
    residual: Float[Tensor, "b t s d"]


class HyperConnectionModule(nn.Module):
    """The hyper-connection around one sublayer, with the parameters phi, alpha and bias.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module, which with config.seed determines its initial values; None:
            ``hyper_connection.<layer_number>``.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str | None = None) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        name = name or f"hyper_connection.{layer_number}"
        specs = hyper_connection_spec(config)
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
        """Return the input of the sublayer, the mixed residual, and h_post for the output of the sublayer.

        Args:
            hidden_states: residual streams that give the coefficients and the aggregate. [B, T, S, D]
            residual: residual streams to mix; in a transformer the same tensor. [B, T, S, D]
            training: accepted for symmetry with other modules, and has no effect.
            mhc_recompute_manager: drops the returned tensors after forward and recomputes them in backward.

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
        merge_residual_gradient: bool = True,
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t s d"] | DeferredMix, Float[Tensor, "b t s"]]:
        """Run forward with hidden_states as the residual; with kernels, defer mixing to write_streams.

        Args:
            hidden_states: residual streams. [B, T, S, D]
            mhc_recompute_manager: see forward.
            merge_residual_gradient: see read_streams; False if recompute drops hidden_states, which it cannot while a
                view exists.

        Returns:
            aggregated [B, T, D], mixed [B, T, S, D] or a DeferredMix, h_post [B, T, S].
        """
        if kernel_backend(self.config.impl, hidden_states) is None:
            return self(hidden_states, hidden_states, mhc_recompute_manager=mhc_recompute_manager)
        if mhc_recompute_manager is None:
            read = partial(read_streams, merge_residual_gradient=merge_residual_gradient, **self._mapping_options)
            aggregated, h_post, h_res, residual = read(hidden_states, *self._mapping_parameters)
            return aggregated, DeferredMix(h_res, residual), h_post
        aggregated, h_post, h_res = mhc_recompute_manager.checkpoint(self._aggregate_mappings, hidden_states)
        return aggregated, DeferredMix(h_res, hidden_states), h_post

    def _aggregate_mappings(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return aggregated [B, T, D], h_post [B, T, S] and h_res [B, T, S, S] of the streams x [B, T, S, D]."""
        return read_streams(x, *self._mapping_parameters, **self._mapping_options, merge_residual_gradient=False)[:3]

    def compute_mappings(self, x: Float[Tensor, "b t s d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return h_pre [B, T, S], h_post [B, T, S] and h_res [B, T, S, S] of the streams x [B, T, S, D]."""
        return compute_mappings(x, *self._mapping_parameters, **self._mapping_options)

    @property
    def _mapping_parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        """The parameters of compute_mappings."""
        return self.phi, self.alpha, self.bias

    @property
    def _mapping_options(self) -> dict[str, Any]:
        """The settings of compute_mappings."""
        return dict(
            iterations=self.config.sinkhorn_iterations,
            last=self.config.sinkhorn_last,
            rms_epsilon=self.config.layernorm_epsilon,
            mhc_epsilon=self.config.mhc_epsilon,
            transposed=self.config.mhc_transpose_h_res,
            impl=self.config.impl,
        )

    def aggregate(self, x: Float[Tensor, "b t s d"], h_pre: Float[Tensor, "b t s"]) -> Tensor:
        """Call the function aggregate."""
        return aggregate(x, h_pre, self.config.impl)

    def apply_h_res(self, h_res: Float[Tensor, "b t s s"], residual: Float[Tensor, "b t s d"]) -> Tensor:
        """Call the function apply_h_res."""
        return apply_h_res(h_res, residual, self.config.impl)

    def apply_h_post(
        self, x_with_bias: tuple[Tensor, Tensor | None], h_post: Float[Tensor, "b t s"]
    ) -> tuple[Tensor, None]:
        """Return the expanded output [B, T, S, D] and None, because the bias is already added."""
        x, bias = x_with_bias
        return apply_h_post(x, bias, h_post, self.config.impl), None

    def apply_h_post_with_checkpoint(
        self,
        x_with_bias: tuple[Tensor, Tensor | None],
        h_post: Float[Tensor, "b t s"],
        manager: MHCBlockRecomputeManager | None = None,
    ) -> tuple[Tensor, None]:
        """Run apply_h_post; with a manager, drop its output and recompute it in backward."""
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
        """Return the next residual streams: ``mixed + dropout(expanded)``.

        Args:
            x_with_bias: output of the sublayer [B, T, D] and its bias [D] or None.
            h_post: from forward or read. [B, T, S]
            mixed: from forward or read. [B, T, S, D]
            state: dropout state of the batch; None: no dropout.
            site: see ops.dropout.
        """
        x, bias = x_with_bias
        h_res, residual = mixed if isinstance(mixed, DeferredMix) else (None, mixed)
        rate = self.config.hidden_dropout
        impl = self.config.impl
        return write_streams(residual, h_res, x, bias, h_post, rate, state, site, impl)

    @staticmethod
    def input_expand(x: Float[Tensor, "b t d"], n: int) -> Float[Tensor, "b t n d"]:
        """Copy the input of a transformer block to n streams."""
        return x.unsqueeze(-2).repeat(1, 1, n, 1)

    @staticmethod
    def output_contract(x: Float[Tensor, "b t n d"], n: int) -> Float[Tensor, "b t d"]:
        """Return the mean of the n streams, the output of a transformer block.

        Raises:
            ValueError: x does not have n streams.
        """
        if x.shape[-2] != n:
            raise ValueError(f"n: expected the number of streams of x, {x.shape[-2]}, got {n}; pass n=x.shape[-2]")
        return x.mean(-2)


class HyperConnectionHead(nn.Module):
    """The learned sum of the streams after the last layer, with the parameters phi, alpha and bias.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
    """

    def __init__(self, config: TransformerConfig, name: str) -> None:
        super().__init__()
        self.config = config
        specs = hyper_connection_head_spec(config)
        self.phi = parameter(config, f"{name}.phi", specs["phi"])
        self.alpha = parameter(config, f"{name}.alpha", specs["alpha"])
        self.bias = parameter(config, f"{name}.bias", specs["bias"])

    def forward(self, x: Float[Tensor, "b t s d"]) -> Float[Tensor, "b t d"]:
        """Call contract_streams."""
        return contract_streams(
            x,
            self.phi,
            self.alpha,
            self.bias,
            rms_epsilon=self.config.layernorm_epsilon,
            mhc_epsilon=self.config.mhc_epsilon,
            impl=self.config.impl,
        )
