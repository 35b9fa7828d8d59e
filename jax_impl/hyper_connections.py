"""Manifold-constrained hyper-connections (mHC): S residual streams instead of one.

For residual streams x [B, T, S, D], with r = 1 / rms of the S*D elements of a token:

    h          = r * (x_flat @ phi) * alpha + bias      phi [S*D, S*S + 2*S], alpha: one gain per group
    h_pre      = sigmoid(h[:S])                          reads the streams: aggregated = h_pre . x
    h_post     = 2 sigmoid(h[S:2S])                      writes the output of a sublayer to the streams
    h_res      = sinkhorn(h[2S:])                        mixes the streams, doubly stochastic
    x_next     = h_res @ x + dropout(h_post * (output + b))     output of the sublayer, and b its bias

Mirrors ``reference_torch/hyper_connections.py``, which explains why h_res is doubly stochastic. doubly_stochastic.py
explains why the token axis is innermost. PyTorch calls batched matrix products; JAX uses einsums. XLA's CPU backend
takes up to ten times as long for some products with a transposed operand, or materialises broadcasts. So transposes of
small operands are kept out of products by ``jax.lax.optimization_barrier``.

Reference: mHC, arXiv 2512.24880, eqs. 3-9. Layout is batch first, [B, T, S, D].
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Integer

from diptych.plans.config import TransformerConfig
from diptych.plans.model import operations
from diptych.plans.model.parameters import hyper_connection_head_spec, hyper_connection_spec
from diptych_kernels.mesh_axes import match_varying_axes
from jax_impl.doubly_stochastic import sinkhorn
from jax_impl.operands import at_least_float32, given_operand, operand
from jax_impl.ops import DropoutState, add_bias, check_state, dropout, kernel_backend, parameter
from jax_impl.recompute import name_value


def compute_mappings(
    x: Float[Array, "b t s d"],
    phi: Float[Array, "sd c"],
    alpha: Float[Array, "3"],
    bias: Float[Array, " c"],
    *,
    iterations: int = 20,
    last: str = "row",
    rms_epsilon: float = 1e-5,
    mhc_epsilon: float = 0.0,
    transposed: bool = False,
    impl: str = "auto",
) -> tuple[Float[Array, "b t s"], Float[Array, "b t s"], Float[Array, "b t s s"]]:
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
    gain = jnp.concatenate([jnp.full(size, alpha[i]) for i, size in enumerate(groups)])
    h = jax.lax.optimization_barrier(_project(x, phi, rms_epsilon) * gain + bias).T
    h_pre, h_post, h_res = jnp.split(h, (streams, 2 * streams))
    h_pre = jax.nn.sigmoid(h_pre) + mhc_epsilon
    h_post = 2 * jax.nn.sigmoid(h_post)
    order = (2, 1, 0) if transposed else (2, 0, 1)
    h_res = sinkhorn(h_res.reshape(streams, streams, -1).transpose(order), iterations, last, impl, mhc_epsilon)
    shape = (batch, length, streams)
    return (
        name_value(h_pre.T.reshape(shape), "h_pre"),
        name_value(h_post.T.reshape(shape), "h_post"),
        name_value(h_res.reshape(*shape, streams), "h_res"),
    )


def _project(x: Array, phi: Array, epsilon: float) -> Array:
    """Return the projection of every token's streams [B, T, S, D], divided by their root mean square. [B*T, C]."""
    return _projection(*match_varying_axes((x.reshape(x.shape[0] * x.shape[1], -1), phi)), epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _projection(x: Array, phi: Array, epsilon: float) -> Array:
    """Return x [N, K] @ phi [K, C], each row divided by the root mean square of its x."""
    return at_least_float32(x @ phi.astype(x.dtype)) * _inverse_rms(x, epsilon)


def _projection_forward(x: Array, phi: Array, epsilon: float) -> tuple[Array, tuple[Array, Array, Array]]:
    """Run _projection, and save its arguments and its result."""
    normalized: Array = _projection(x, phi, epsilon)
    return normalized, (x, phi, normalized)


def _projection_backward(epsilon: float, saved: tuple[Array, Array, Array], grad: Array) -> tuple[Array, Array]:
    """Return the gradients of _projection."""
    x, phi, normalized = saved
    inverse = _inverse_rms(x, epsilon)
    of_squares = (grad * normalized).sum(-1, keepdims=True) * inverse * inverse / -x.shape[-1]
    of_product = (grad * inverse).astype(x.dtype)
    transposed = jax.lax.optimization_barrier(of_product.T)
    grad_phi = jax.lax.optimization_barrier(transposed @ x).T
    return x * of_squares.astype(x.dtype) + of_product @ phi.astype(x.dtype).T, grad_phi.astype(phi.dtype)


_projection.defvjp(_projection_forward, _projection_backward)


def _inverse_rms(x: Array, epsilon: float) -> Array:
    """Return 1 / rms of each row of x [N, K], in at least float32, as [N, 1]."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(at_least_float32(x)), axis=-1, keepdims=True) + epsilon)


def contract_streams(
    x: Float[Array, "b t s d"],
    phi: Float[Array, "sd s"],
    alpha: Float[Array, "1"],
    bias: Float[Array, " s"],
    *,
    rms_epsilon: float = 1e-5,
    mhc_epsilon: float = 0.0,
    impl: str = "auto",
) -> Float[Array, "b t d"]:
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
    weights = jax.nn.sigmoid(_project(x, phi, rms_epsilon) * alpha + bias) + mhc_epsilon
    return aggregate(x, weights.reshape(x.shape[:3]), impl)


def aggregate(x: Float[Array, "b t s d"], h_pre: Float[Array, "b t s"], impl: str = "auto") -> Float[Array, "b t d"]:
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
    return name_value(jnp.einsum("bts,btsd->btd", h_pre.astype(x.dtype), x), "aggregated")


def read_streams(
    x: Float[Array, "b t s d"],
    phi: Float[Array, "sd c"],
    alpha: Float[Array, "3"],
    bias: Float[Array, " c"],
    *,
    iterations: int = 20,
    last: str = "row",
    rms_epsilon: float = 1e-5,
    mhc_epsilon: float = 0.0,
    transposed: bool = False,
    merge_residual_gradient: bool = True,
    impl: str = "auto",
) -> tuple[Float[Array, "b t d"], Float[Array, "b t s"], Float[Array, "b t s s"], Float[Array, "b t s d"]]:
    """Return the input of a sublayer, h_post and h_res for write_streams, and x as its residual.

    With Triton kernels, the gradient of x is written once if write_streams gets the returned x. The results are those
    of compute_mappings and aggregate; the returned x equals x.

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


def apply_h_res(
    h_res: Float[Array, "b t s s"], residual: Float[Array, "b t s d"], impl: str = "auto"
) -> Float[Array, "b t s d"]:
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
    return name_value(_mix(*match_varying_axes((h_res.astype(residual.dtype), residual))), "mixed")


@jax.custom_vjp
def _mix(h_res: Array, x: Array) -> Array:
    """Return h_res @ x of every token."""
    return jnp.einsum("btsj,btjd->btsd", h_res, x)


@jax.custom_vjp
def _mix_transposed(h_res: Array, x: Array) -> Array:
    """Return h_res^T @ x of every token.

    Its own gradients contain no transpose of a product: XLA's CPU backend (jaxlib 0.10.2) aborts on some.
    """
    transposed = jax.lax.optimization_barrier(h_res.swapaxes(2, 3))
    return jnp.einsum("btjs,btsd->btjd", transposed, x)


def _outer(x: Array, y: Array) -> Array:
    """Return the products of all pairs of streams, summed over D."""
    return jnp.einsum("btsd,btjd->btsj", x, y)


def _save_operands(h_res: Array, x: Array, function: Callable[[Array, Array], Array]) -> tuple[Array, tuple]:
    """Run a function, and save its arguments."""
    return function(h_res, x), (h_res, x)


def _mix_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    """Return the gradients of _mix."""
    h_res, x = saved
    return _outer(grad, x), _mix_transposed(h_res, grad)


def _mix_transposed_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    """Return the gradients of _mix_transposed."""
    h_res, x = saved
    return _outer(x, grad), _mix(h_res, grad)


_mix.defvjp(partial(_save_operands, function=_mix), _mix_backward)
_mix_transposed.defvjp(partial(_save_operands, function=_mix_transposed), _mix_transposed_backward)


def apply_h_post(
    output: Float[Array, "b t d"], bias: Float[Array, " d"] | None, h_post: Float[Array, "b t s"], impl: str = "auto"
) -> Float[Array, "b t s d"]:
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
    return name_value(jnp.einsum("bts,btd->btsd", h_post.astype(output.dtype), y), "expanded")


def write_streams(
    residual: Float[Array, "b t s d"],
    h_res: Float[Array, "b t s s"] | None,
    output: Float[Array, "b t d"],
    bias: Float[Array, " d"] | None,
    h_post: Float[Array, "b t s"],
    rate: float = 0.0,
    state: DropoutState | None = None,
    site: int | Integer[Array, ""] = 0,
    impl: str = "auto",
) -> Float[Array, "b t s d"]:
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
    return mixed + apply_h_post(output, bias, h_post, impl="reference")


class DeferredMix(NamedTuple):
    """The operands of mixed streams, which write_streams computes: this saves one pass over the streams."""

    h_res: Float[Array, "b t s s"]
    residual: Float[Array, "b t s d"]


class HyperConnectionModule(nnx.Module):
    """The hyper-connection around one sublayer, with the parameters phi, alpha and bias.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module, which with config.seed determines its initial values; None:
            ``hyper_connection.<layer_number>``.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str | None = None) -> None:
        self.config = config
        self.layer_number = layer_number
        name = name or f"hyper_connection.{layer_number}"
        specs = hyper_connection_spec(config)
        self.phi = parameter(config, f"{name}.phi", specs["phi"])
        self.alpha = parameter(config, f"{name}.alpha", specs["alpha"])
        self.bias = parameter(config, f"{name}.bias", specs["bias"])

    def __call__(
        self,
        hidden_states: Float[Array, "b t s d"],
        residual: Float[Array, "b t s d"],
        training: bool = True,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t s d"], Float[Array, "b t s"]]:
        """Return the input of the sublayer, the mixed residual, and h_post for the output of the sublayer.

        Args:
            hidden_states: residual streams that give the coefficients and the aggregate. [B, T, S, D]
            residual: residual streams to mix; in a transformer the same array. [B, T, S, D]
            training: accepted for symmetry with other modules, and has no effect.

        Returns:
            aggregated [B, T, D], mixed [B, T, S, D], h_post [B, T, S].
        """
        h_pre, h_post, h_res = self.compute_mappings(hidden_states)
        return self.aggregate(hidden_states, h_pre), self.apply_h_res(h_res, residual), h_post

    def read(
        self,
        hidden_states: Float[Array, "b t s d"],
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t s d"] | DeferredMix, Float[Array, "b t s"]]:
        """Call the module with hidden_states as the residual; with kernels, defer mixing to write_streams.

        Args:
            hidden_states: residual streams. [B, T, S, D]

        Returns:
            aggregated [B, T, D], mixed [B, T, S, D] or a DeferredMix, h_post [B, T, S].
        """
        if kernel_backend(self.config.impl, hidden_states) is None:
            return self(hidden_states, hidden_states)
        aggregated, h_post, h_res, residual = read_streams(
            hidden_states, *self._mapping_parameters, **self._mapping_options
        )
        return aggregated, DeferredMix(h_res, residual), h_post

    def compute_mappings(self, x: Float[Array, "b t s d"]) -> tuple[Array, Array, Array]:
        """Return h_pre [B, T, S], h_post [B, T, S] and h_res [B, T, S, S] of the streams x [B, T, S, D]."""
        return compute_mappings(x, *self._mapping_parameters, **self._mapping_options)

    @property
    def _mapping_parameters(self) -> tuple[Array, Array, Array]:
        """The parameters of compute_mappings."""
        return self.phi[...], self.alpha[...], self.bias[...]

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

    def aggregate(self, x: Float[Array, "b t s d"], h_pre: Float[Array, "b t s"]) -> Array:
        """Call the function aggregate."""
        return aggregate(x, h_pre, self.config.impl)

    def apply_h_res(self, h_res: Float[Array, "b t s s"], residual: Float[Array, "b t s d"]) -> Array:
        """Call the function apply_h_res."""
        return apply_h_res(h_res, residual, self.config.impl)

    def apply_h_post(
        self, x_with_bias: tuple[Array, Array | None], h_post: Float[Array, "b t s"]
    ) -> tuple[Array, None]:
        """Return the expanded output [B, T, S, D] and None, because the bias is already added."""
        x, bias = x_with_bias
        return apply_h_post(x, bias, h_post, self.config.impl), None

    def apply_h_post_dropout_add(
        self,
        x_with_bias: tuple[Array, Array | None],
        h_post: Float[Array, "b t s"],
        mixed: Float[Array, "b t s d"] | DeferredMix,
        state: DropoutState | None,
        site: int | Integer[Array, ""],
    ) -> Float[Array, "b t s d"]:
        """Return the next residual streams: ``mixed + dropout(expanded)``.

        Args:
            x_with_bias: output of the sublayer [B, T, D] and its bias [D] or None.
            h_post: from a call of the module or from read. [B, T, S]
            mixed: from a call of the module or from read. [B, T, S, D]
            state: dropout state of the batch; None: no dropout.
            site: see ops.dropout.
        """
        x, bias = x_with_bias
        h_res, residual = mixed if isinstance(mixed, DeferredMix) else (None, mixed)
        rate = self.config.hidden_dropout
        impl = self.config.impl
        return write_streams(residual, h_res, x, bias, h_post, rate, state, site, impl)

    @staticmethod
    def input_expand(x: Float[Array, "b t d"], n: int) -> Float[Array, "b t n d"]:
        """Copy the input of a transformer block to n streams."""
        return jnp.repeat(x[..., None, :], n, axis=-2)

    @staticmethod
    def output_contract(x: Float[Array, "b t n d"], n: int) -> Float[Array, "b t d"]:
        """Return the mean of the n streams, the output of a transformer block.

        Raises:
            ValueError: x does not have n streams.
        """
        if x.shape[-2] != n:
            raise ValueError(f"n: expected the number of streams of x, {x.shape[-2]}, got {n}; pass n=x.shape[-2]")
        return x.mean(-2)


class HyperConnectionHead(nnx.Module):
    """The learned sum of the streams after the last layer, with the parameters phi, alpha and bias.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
    """

    def __init__(self, config: TransformerConfig, name: str) -> None:
        self.config = config
        specs = hyper_connection_head_spec(config)
        self.phi = parameter(config, f"{name}.phi", specs["phi"])
        self.alpha = parameter(config, f"{name}.alpha", specs["alpha"])
        self.bias = parameter(config, f"{name}.bias", specs["bias"])

    def __call__(self, x: Float[Array, "b t s d"]) -> Float[Array, "b t d"]:
        """Call contract_streams."""
        return contract_streams(
            x,
            self.phi[...],
            self.alpha[...],
            self.bias[...],
            rms_epsilon=self.config.layernorm_epsilon,
            mhc_epsilon=self.config.mhc_epsilon,
            impl=self.config.impl,
        )
