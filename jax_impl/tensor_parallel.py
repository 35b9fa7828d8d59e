"""Tensor and sequence parallelism in JAX: exchanges between devices of a mesh axis around regions of layers.

diptych/plans/tensor_parallel.py defines the parts of parameters and of tokens that a rank holds. Every exchange has its
own derivative, the opposite exchange. Mirrors ``reference_torch/tensor_parallel.py``, which lists them.

The exchanges run inside of branches that only some pipeline ranks take, but all devices of this axis together. They
are therefore made of collectives by groups (all_gather, psum, psum_scatter); a ppermute would wait for all devices.

Reference: Shoeybi et al., arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from diptych.plans.model.parameters import Split
from diptych.plans.tensor_parallel import gradient_is_partial, repeated_entries
from diptych_kernels.mesh_axes import match_varying_axes, vary
from jax_impl.ops import DropoutState, cross_entropy, rms_norm
from jax_impl.recompute import name_value

TOKENS = 1
"""Axis of tokens in [B, T, ...]."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share the layers of this rank; without an axis, this rank has them alone."""

    axis: str | None = None
    """Mesh axis of the ranks, in the order of their parts."""
    size: int = 1
    """Number of ranks."""
    sequence_parallel: bool = False
    """The ranks have different tokens between regions."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axis of the ranks, if there is one."""
        return () if self.axis is None else (self.axis,)

    @property
    def rank(self) -> Array | int:
        """Index of this rank in the group."""
        return 0 if self.axis is None else lax.axis_index(self.axis)

    @property
    def token_parts(self) -> int:
        """Number of parts into which tokens are split between regions."""
        return self.size if self.sequence_parallel else 1

    def enter(self, x: Float[Array, "b t d"]) -> Float[Array, "b t2 d"]:
        """Return the tokens of all ranks, as every rank of a region needs them.

        In Megatron-core this is gather_from_sequence_parallel_region, and without sequence parallelism
        copy_to_tensor_model_parallel_region.

        Args:
            x: tokens of this rank; without sequence parallelism, of all ranks. [B, T / n, D] or [B, T, D]

        Returns:
            [B, T, D]
        """
        if self.size == 1:
            return x
        return name_value(_gather(self, x) if self.sequence_parallel else _sum_of_gradients(self, x), "region_input")

    def leave(self, x: Float[Array, "b t d"]) -> Float[Array, "b t2 d"]:
        """Return the sum over ranks of the outputs of a region, of this rank's tokens with sequence parallelism.

        In Megatron-core this is reduce_scatter_to_sequence_parallel_region, and without sequence parallelism
        reduce_from_tensor_model_parallel_region.

        Args:
            x: partial sums of all tokens. [B, T, D]

        Returns:
            [B, T / n, D] or [B, T, D]
        """
        if self.size == 1:
            return x
        return name_value(_scatter(self, x) if self.sequence_parallel else _sum(self, x), "region_output")

    def own_tokens(self, x: Array) -> Array:
        """Return this rank's tokens of values [B, T, ...] between regions."""
        if self.token_parts == 1:
            return x
        count = x.shape[TOKENS] // self.size
        return lax.dynamic_slice_in_dim(x, self.rank * count, count, TOKENS)

    def replicated_output(self, x: Float[Array, "b t"]) -> Float[Array, "b t2"]:
        """Return values that all ranks compute equally in a region, for use between regions.

        Args:
            x: values of all tokens, the same on every rank. [B, T]

        Returns:
            Those of this rank's tokens [B, T / n]; without sequence parallelism all of them [B, T], with the gradient
            divided by the number of ranks, because the gradients of the region's parameters and of its input are summed
            over the ranks. In PyTorch, replicated_input stands in for the sum of the input's gradient.
        """
        if self.size == 1 or self.sequence_parallel:
            return self.own_tokens(x)
        return _divide_gradient(self, x)

    def local_dropout_state(self, state: DropoutState | None) -> DropoutState | None:
        """Return the dropout state of this rank's tokens, so that they have the masks of the single-device model."""
        if state is None or self.token_parts == 1:
            return state
        return state._replace(row_low=self.own_tokens(state.row_low), row_high=self.own_tokens(state.row_high))

    def embed(self, tokens: Int[Array, "b t"], weight: Float[Array, "v d"]) -> Float[Array, "b t2 d"]:
        """Return the vectors of the tokens, [B, T, D], or of this rank's tokens with sequence parallelism.

        Args:
            tokens: token ids; an id outside the vocabulary gives NaN. [B, T]
            weight: vectors of this rank's token ids. [V / n, D]
        """
        count = len(weight)
        known = (tokens >= 0) & (tokens < count * self.size)
        own, is_own = self._own_ids(tokens, count)
        vectors = jnp.where(is_own[..., None], weight[own], 0.0)
        return self.leave(jnp.where(known[..., None], vectors, jnp.nan))

    def cross_entropy(self, logits: Float[Array, "b t v"], targets: Int[Array, "b t"]) -> Float[Array, ""]:
        """Return the mean negative log-likelihood of the targets, in nats per token, on every rank.

        Args:
            logits: of this rank's token ids. [B, T, V / n]
            targets: token ids; NaN if one is no token id. [B, T]
        """
        if self.size == 1:
            return cross_entropy(logits, targets)
        own, is_own = self._own_ids(targets, logits.shape[-1])
        known = (targets >= 0) & (targets < logits.shape[-1] * self.size)
        loss: Any = _cross_entropy(self, logits, jnp.where(is_own, own, -1))
        return jnp.where(known.all(), loss, jnp.nan)

    def gather_logits(self, logits: Float[Array, "b t v"]) -> Float[Array, "b t v2"]:
        """Return the logits of all token ids, [B, T, V], from those of this rank's, [B, T, V / n].

        All ranks compute the same values from the logits, so each rank keeps its part of the gradient.
        """
        if self.size == 1:
            return logits
        return jnp.moveaxis(_gather_for_all(self, jnp.moveaxis(logits, -1, TOKENS)), TOKENS, -1)

    def mean(self, x: Float[Array, "b t"]) -> Float[Array, ""]:
        """Return the mean over all tokens of values between regions, [B, T] or [B, T / n]."""
        mean = x.mean()
        return mean if self.token_parts == 1 else _sum(self, mean / self.size)

    def joint_norm(self, x: Float[Array, "*b c"], weight: Float[Array, " c"], epsilon: float) -> Float[Array, "*b c"]:
        """Return ops.rms_norm over the channels of all ranks together.

        Args:
            x: channels of this rank's heads; several ranks may have the same head. [..., C]
            weight: gain of these channels. [C]
            epsilon: added to the mean square.
        """
        if self.size == 1:
            return rms_norm(x, weight, epsilon)
        wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
        # A mean of means counts every head equally often, also a head that several ranks hold.
        mean = _sum_both(self, jnp.square(wide).mean(-1, keepdims=True)) / self.size
        return (wide * lax.rsqrt(mean + epsilon) * weight.astype(wide.dtype)).astype(x.dtype)

    def _own_ids(self, tokens: Array, count: int) -> tuple[Array, Array]:
        """Return the tokens as indices into this rank's ids (0 for those of other ranks), and which are its own."""
        local = tokens - self.rank * count
        is_own = (local >= 0) & (local < count)
        return jnp.where(is_own, local, 0), is_own


UNSHARDED = TensorParallel()
"""One rank, which holds all layers and parameters unsharded."""


def sum_repeated(
    gradients: Mapping[str, Array], splits: Mapping[str, Split | None], tensor_parallel: TensorParallel
) -> dict[str, Array]:
    """Sum the gradients of elements that several ranks hold, if each rank has only a part of the gradient.

    Args:
        gradients: gradients of this rank's parameters, by canonical name; axes before those of the parameter may stack
            several parameters.
        splits: division of every parameter, by the same names.
        tensor_parallel: the ranks.
    """
    size = tensor_parallel.size
    found = dict(gradients)
    for name, gradient in gradients.items():
        split = splits[name]
        if not gradient_is_partial(name, tensor_parallel.sequence_parallel):
            continue
        if split is None:
            found[name] = _total(tensor_parallel, gradient)
            continue
        each = [repeated_entries(split, size, rank) for rank in range(size)]
        if not each[0].total:
            continue
        held = each[0].held  # the same places in the part of every rank
        assert all(np.array_equal(held, other.held) for other in each), "parts have equal sections on all ranks"
        places = jnp.asarray(np.stack([other.places for other in each]))[tensor_parallel.rank]
        rows = jnp.moveaxis(gradient, split.axis, 0)
        zeros = jnp.zeros((each[0].total, *rows.shape[1:]), rows.dtype)
        buffer, own = match_varying_axes((zeros, rows[held]))
        total = _total(tensor_parallel, buffer.at[places].set(own))
        found[name] = jnp.moveaxis(rows.at[held].set(total[places]), 0, split.axis)
    return found


def _total(among: TensorParallel, x: Array) -> Array:
    """Return the sum over the ranks, marked as varying over their axis like all other values of a pipeline."""
    return vary(lax.psum(x, among.axis), among.axes)


def _gathered(among: TensorParallel, x: Array) -> Array:
    """Return the tokens of all ranks, side by side."""
    return lax.all_gather(x, among.axis, axis=TOKENS, tiled=True)


def _scattered(among: TensorParallel, x: Array) -> Array:
    """Return the sum over ranks of this rank's tokens."""
    return lax.psum_scatter(x, among.axis, scatter_dimension=TOKENS, tiled=True)


def _own_part(among: TensorParallel, x: Array) -> Array:
    """Return this rank's tokens of values that all ranks have."""
    count = x.shape[TOKENS] // among.size
    return lax.dynamic_slice_in_dim(x, among.rank * count, count, TOKENS)


def _unchanged(among: TensorParallel, x: Array) -> Array:
    """Return the input."""
    del among
    return x


def _exchange(
    forward: Callable[[TensorParallel, Array], Array], backward: Callable[[TensorParallel, Array], Array]
) -> Callable[[TensorParallel, Array], Array]:
    """Return an exchange whose derivative is the exchange ``backward``."""
    exchange: Any = jax.custom_vjp(forward, nondiff_argnums=(0,))
    exchange.defvjp(lambda among, x: (forward(among, x), None), lambda among, _, grad: (backward(among, grad),))
    return exchange


_gather = _exchange(_gathered, _scattered)
_gather_for_all = _exchange(_gathered, _own_part)
_scatter = _exchange(_scattered, _gathered)
_sum = _exchange(_total, _unchanged)
_sum_of_gradients = _exchange(_unchanged, _total)
_sum_both = _exchange(_total, _total)
_divide_gradient = _exchange(_unchanged, lambda among, grad: grad / among.size)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(among: TensorParallel, logits: Array, ids: Array) -> Array:
    """Return the mean cross entropy; ids are indices of this rank's logits, or -1 for targets of other ranks."""
    return _cross_entropy_forward(among, logits, ids)[0]


def _cross_entropy_forward(among: TensorParallel, logits: Array, ids: Array) -> tuple[Array, Any]:
    """Return the loss, and probabilities and ids for backward."""
    largest = vary(lax.pmax(logits.max(-1), among.axis), among.axes)
    shifted = logits - largest[..., None]
    chosen = jnp.take_along_axis(shifted, jnp.maximum(ids, 0)[..., None], axis=-1)[..., 0]
    chosen = _total(among, jnp.where(ids >= 0, chosen, 0.0))
    exponentials = jnp.exp(shifted)
    total = _total(among, exponentials.sum(-1))
    return (jnp.log(total) - chosen).mean(), (exponentials / total[..., None], ids)


def _cross_entropy_backward(among: TensorParallel, saved: Any, grad: Array) -> tuple[Array, None]:
    """Return the gradient of the logits."""
    del among
    probabilities, ids = saved
    is_target = ids[..., None] == jnp.arange(probabilities.shape[-1])
    return (probabilities - is_target) * (grad / ids.size), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
