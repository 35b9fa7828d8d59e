"""Tensor and sequence parallelism in PyTorch: exchanges between ranks of a group around regions of layers.

diptych/plans/tensor_parallel.py defines regions, and the parts of parameters and tokens that a rank holds. Every
exchange is one operation of autograd, whose backward is the opposite exchange:

    before a region     gather the tokens of all ranks          backward: scatter the sum of the gradients
    after a region      scatter the sum of the outputs          backward: gather the gradients
    without sequence parallelism: nothing before a region       backward: sum of the gradients
                                  sum of the outputs after it   backward: nothing

The cross entropy of logits that are divided by token ids exchanges three elements per token instead of logits.

Reference: Shoeybi et al., arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from diptych.plans.model import operations
from diptych.plans.model.parameters import Split
from diptych.plans.tensor_parallel import gradient_is_partial, is_repeated, repeated_entries, share_counted
from reference_torch.autograd import differentiable_once
from reference_torch.groups import wait_for
from reference_torch.ops import DropoutState, cross_entropy, rms_norm
from reference_torch.recompute import name_value

TOKENS = 1
"""Axis of tokens in [B, T, ...]."""


class TensorParallel(NamedTuple):
    """The ranks that share the layers of this rank; without a group, this rank has them alone."""

    group: ProcessGroup | None = None
    """The ranks, in the order of their parts."""
    sequence_parallel: bool = False
    """The ranks have different tokens between regions."""
    timeout: float = 600.0
    """Seconds to wait for the other ranks."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def token_parts(self) -> int:
        """Number of parts into which tokens are split between regions."""
        return self.size if self.sequence_parallel else 1

    def enter(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t2 d"]:
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
        return name_value((_gather if self.sequence_parallel else _sum_of_gradients)(x, self), "region_input")

    def leave(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t2 d"]:
        """Return the sum of a region's outputs over the ranks; with sequence parallelism, only this rank's tokens.

        In Megatron-core this is reduce_scatter_to_sequence_parallel_region, and without sequence parallelism
        reduce_from_tensor_model_parallel_region.

        Args:
            x: partial sums of all tokens. [B, T, D]

        Returns:
            [B, T / n, D] or [B, T, D]
        """
        if self.size == 1:
            return x
        return name_value((_scatter if self.sequence_parallel else _sum)(x, self), "region_output")

    def own_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of values [B, T, ...] between regions, a view."""
        if self.token_parts == 1:
            return x
        count = x.shape[TOKENS] // self.size
        return x.narrow(TOKENS, self.rank * count, count)

    def replicated_input(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the input of a computation that every rank repeats; replicated_output returns a part of its result.

        Args:
            x: with sequence parallelism, values in a region; without, the values before it. [B, T, D]

        Returns:
            x; without sequence parallelism, its gradient is multiplied by the number of ranks, as if it were summed
            over them.
        """
        return x if self.size == 1 or self.sequence_parallel else _multiply_gradient(x, self)

    def replicated_output(self, x: Float[Tensor, "b t"]) -> Float[Tensor, "b t2"]:
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
        return _divide_gradient(x, self)

    def local_dropout_state(self, state: DropoutState | None) -> DropoutState | None:
        """Return the dropout state of this rank's tokens, so that they have the masks of the single-device model."""
        if state is None or self.token_parts == 1:
            return state
        low, high = (self.own_tokens(row).contiguous() for row in (state.row_low, state.row_high))
        return state._replace(row_low=low, row_high=high)

    def embed(self, tokens: Int[Tensor, "b t"], weight: Float[Tensor, "v d"]) -> Float[Tensor, "b t2 d"]:
        """Return the vectors of the tokens, [B, T, D], or with sequence parallelism those of this rank's tokens.

        Args:
            tokens: token ids. [B, T]
            weight: vectors of this rank's token ids. [V / n, D]

        Raises:
            IndexError: on a CPU, a token id is outside the vocabulary. On a GPU, CUDA reports a failed assertion at a
                later synchronisation.
        """
        if self.size == 1:
            return nn.functional.embedding(tokens, weight)
        _check_ids(tokens, len(weight) * self.size)
        own, is_own = self._own_ids(tokens, len(weight))
        return self.leave(nn.functional.embedding(own, weight) * is_own[..., None].to(weight.dtype))

    def cross_entropy(self, logits: Float[Tensor, "b t v"], targets: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
        """Return the mean negative log-likelihood of the targets, in nats per token, on every rank.

        Args:
            logits: of this rank's token ids. [B, T, V / n]
            targets: token ids. [B, T]

        Raises:
            IndexError: on a CPU, a target is no token id. On a GPU, CUDA reports a failed assertion at a later
                synchronisation.
        """
        if self.size == 1:
            return cross_entropy(logits, targets)
        count = logits.shape[-1]
        _check_ids(targets, count * self.size)
        return _CrossEntropy.apply(logits, *self._own_ids(targets, count), self)

    def gather_logits(self, logits: Float[Tensor, "b t v"]) -> Float[Tensor, "b t v2"]:
        """Return the logits of all token ids, [B, T, V], from those of this rank's, [B, T, V / n].

        All ranks compute the same values from the logits, so each rank keeps its part of the gradient.
        """
        if self.size == 1:
            return logits
        return _gather_for_all(logits.movedim(-1, TOKENS), self).movedim(TOKENS, -1)

    def mean(self, x: Float[Tensor, "b t"]) -> Float[Tensor, ""]:
        """Return the mean over all tokens of values between regions, [B, T] or [B, T / n]."""
        mean = x.mean()
        return mean if self.token_parts == 1 else _sum(mean / self.size, self)

    def joint_norm(
        self, x: Float[Tensor, "*b c"], weight: Float[Tensor, " c"], epsilon: float
    ) -> Float[Tensor, "*b c"]:
        """Return ops.rms_norm over the channels of all ranks together.

        Args:
            x: channels of this rank's heads; several ranks may have the same head. [..., C]
            weight: gain of these channels. [C]
            epsilon: added to the mean square.
        """
        if self.size == 1:
            return rms_norm(x, weight, epsilon)
        wide = x if x.dtype == torch.float64 else x.float()
        # A mean of means counts every head equally often, also a head that several ranks hold.
        mean = _sum_both(wide.square().mean(-1, keepdim=True), self) / self.size
        return (wide * (mean + epsilon).rsqrt() * weight.to(wide.dtype)).to(x.dtype)

    def _own_ids(self, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the tokens as indices into this rank's ids (0 for other ids), and True for each id of this rank."""
        local = tokens.long() - self.rank * count
        is_own = (local >= 0) & (local < count)
        return local.where(is_own, 0), is_own


UNSHARDED = TensorParallel()
"""One rank, which holds all layers and parameters unsharded."""


def sum_repeated(
    gradients: Mapping[str, Tensor], splits: Mapping[str, Split | None], tensor_parallel: TensorParallel
) -> None:
    """Sum the gradients of elements that several ranks hold, in place, if each rank has only a part of the gradient.

    Args:
        gradients: gradients of this rank's parameters, by canonical name.
        splits: division of every parameter.
        tensor_parallel: the ranks.

    Raises:
        PipelineError: a rank did not take part in the sum in time.
    """
    size = tensor_parallel.size
    if size == 1:
        return
    summed: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
    for name, gradient in gradients.items():
        if not gradient_is_partial(name, tensor_parallel.sequence_parallel):
            continue
        split = splits[name]
        if split is None:
            summed.append((gradient, gradient, None, None))
            continue
        held, places, total = repeated_entries(split, size, tensor_parallel.rank)
        if not total:
            continue
        rows = gradient.movedim(split.axis, 0)
        indices = torch.from_numpy(held).to(gradient.device)
        targets = torch.from_numpy(places).to(gradient.device)
        buffer = rows.new_zeros((total, *rows.shape[1:])).index_copy(0, targets, rows[indices])
        summed.append((rows, buffer, indices, targets))
    for dtype in sorted({buffer.dtype for _, buffer, _, _ in summed}, key=str):
        same = [each for each in summed if each[1].dtype == dtype]
        flat = torch.cat([buffer.flatten() for _, buffer, _, _ in same])
        _all_reduce(flat, tensor_parallel, "the sum of gradients over tensor-parallel ranks")
        parts = flat.split([buffer.numel() for _, buffer, _, _ in same])
        for (rows, buffer, indices, targets), part in zip(same, parts, strict=True):
            total = part.view(buffer.shape)
            if indices is None or targets is None:
                rows.copy_(total)
            else:
                rows.index_copy_(0, indices, total[targets])


def counted_once(
    gradients: Mapping[str, Tensor], splits: Mapping[str, Split | None], tensor_parallel: TensorParallel
) -> list[Tensor]:
    """Return gradients in which every element counts once in a sum over all ranks; see share_counted of the plans.

    Args:
        gradients: gradients of this rank's parameters, by canonical name.
        splits: division of every parameter.
        tensor_parallel: the ranks.
    """
    size = tensor_parallel.size
    rank = tensor_parallel.rank
    counted = []
    for name, gradient in gradients.items():
        split = splits[name]
        if not is_repeated(split, size):
            counted.append(gradient)
        elif split is not None:
            counts = torch.from_numpy(share_counted(split, size, rank)).to(gradient)
            by_axis = [1] * gradient.dim()
            by_axis[split.axis] = -1
            counted.append(gradient * counts.view(by_axis))  # keeps the shape, which norms_of_shards divides
        elif rank == 0:
            counted.append(gradient)
    return counted


def _all_reduce(x: Tensor, among: TensorParallel, what: str, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """Replace a tensor by its sum over the ranks, or by another reduction, and return it."""
    wait_for(dist.all_reduce(x, operation, group=among.group, async_op=True), what, among.timeout)
    return x


def _gathered(x: Tensor, among: TensorParallel) -> Tensor:
    """Return the tokens of all ranks, side by side."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(among.size)]
    wait_for(dist.all_gather(parts, x, group=among.group, async_op=True), "the tokens of all ranks", among.timeout)
    return torch.cat(parts, dim=TOKENS)


def _scattered(x: Tensor, among: TensorParallel) -> Tensor:
    """Return the sum over ranks of this rank's tokens."""
    if x.shape[TOKENS] % among.size:
        raise ValueError(
            f"inputs: expected with sequence_parallel a multiple of {among.size} tokens, which the ranks divide, got "
            f"{x.shape[TOKENS]}; pad the sequences"
        )
    parts = [part.contiguous() for part in x.chunk(among.size, dim=TOKENS)]
    own = torch.empty_like(parts[0])
    work = dist.reduce_scatter(own, parts, group=among.group, async_op=True)
    wait_for(work, "the sum of the tokens of this rank", among.timeout)
    return own


def _total(x: Tensor, among: TensorParallel) -> Tensor:
    """Return the sum over ranks."""
    return _all_reduce(x.clone(memory_format=torch.contiguous_format), among, "the sum of a region")


def _own_part(x: Tensor, among: TensorParallel) -> Tensor:
    """Return this rank's tokens of values that all ranks have."""
    count = x.shape[TOKENS] // among.size
    return x.narrow(TOKENS, among.rank * count, count)


def _unchanged(x: Tensor, among: TensorParallel) -> Tensor:
    """Return the input, as a view."""
    del among
    return x.view_as(x)


Exchange = Callable[[Tensor, TensorParallel], Tensor]
"""A function that exchanges one tensor per rank."""


def _exchange(forward_exchange: Exchange, backward_exchange: Exchange) -> Exchange:
    """Return an exchange whose derivative is the exchange ``backward_exchange``."""

    class Exchanged(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, among: TensorParallel) -> Tensor:
            ctx.among = among
            return forward_exchange(x, among)

        @staticmethod
        @differentiable_once
        def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return backward_exchange(grad, ctx.among), None

    def exchange(x: Tensor, among: TensorParallel) -> Tensor:
        result = Exchanged.apply(x, among)
        assert isinstance(result, Tensor), "an operation on a tensor returns a tensor"
        return result

    return exchange


_gather = _exchange(_gathered, _scattered)
_gather_for_all = _exchange(_gathered, _own_part)
_scatter = _exchange(_scattered, _gathered)
_sum = _exchange(_total, _unchanged)
_sum_of_gradients = _exchange(_unchanged, _total)
_sum_both = _exchange(_total, _total)
_divide_gradient = _exchange(_unchanged, lambda grad, among: grad / among.size)
_multiply_gradient = _exchange(_unchanged, lambda grad, among: grad * among.size)


class _CrossEntropy(torch.autograd.Function):
    """The mean cross entropy of logits that the ranks share by token ids."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, is_own: Tensor, among: TensorParallel) -> Tensor:
        largest = _all_reduce(logits.amax(-1), among, "the largest logits", dist.ReduceOp.MAX)
        shifted = logits - largest[..., None]
        chosen = shifted.gather(-1, ids[..., None])[..., 0].where(is_own, 0.0)
        exponentials = shifted.exp_()
        total = _all_reduce(exponentials.sum(-1), among, "the sum of exponentials")
        _all_reduce(chosen, among, "the logits of the targets")
        ctx.save_for_backward(exponentials.div_(total[..., None]), ids, is_own)
        return (total.log() - chosen).mean()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        probabilities, ids, is_own = ctx.saved_tensors
        gradient = probabilities.scatter_add(-1, ids[..., None], -is_own[..., None].to(probabilities.dtype))
        return gradient * (grad / ids.numel()), None, None, None


def _check_ids(ids: Tensor, count: int) -> None:
    """Reject token ids outside a vocabulary; on a GPU without waiting for it, as PyTorch's own lookup does."""
    if ids.device.type == "cpu" and ids.numel():
        operations.check_token_ids(int(ids.min()), int(ids.max()), count)
    elif ids.device.type == "cuda":
        is_valid = ((ids >= 0) & (ids < count)).all()
        torch.ops.aten._assert_async.msg(is_valid, f"token ids: expected numbers from 0 to {count - 1}")
