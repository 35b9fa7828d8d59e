"""Reduction of gradients at the end of a step, over all ranks with a copy of the parameters.

With ``use_distributed_optimizer`` a rank receives the sums of its own shards only; its other gradients become 0.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.tensor_parallel import splits_of
from reference_torch.autograd import gradient_dtype
from reference_torch.distributed_optimizer import copy_from_rows, join_by_rank
from reference_torch.groups import ProcessGroups, start_scattered_sum, wait_for
from reference_torch.tensor_parallel import TensorParallel, sum_repeated


class GradientSums:
    """Sums of the gradients of stages, each started as soon as the gradients are complete.

    Gradients of which tensor-parallel ranks have parts are summed over these ranks first, because a shard has other
    entries of a parameter on each of them.

    Args:
        groups: process groups of this rank.
        config: configuration of the model.
        models: stages of this rank. A shared parameter is summed with the last of its stages.
    """

    def __init__(self, groups: ProcessGroups, config: TransformerConfig, models: Sequence[nn.Module]) -> None:
        self._groups = groups
        self._group = groups.with_same_stages
        self._config = config
        self._stages_remaining = Counter(parameter for model in models for parameter in model.parameters())
        self._pending: list[tuple[dist.Work, Tensor, list[Tensor]]] = []

    def start(self, model: nn.Module) -> None:
        """Start to sum the gradients of a stage whose last backward has ended."""
        self._stages_remaining.subtract(model.parameters())
        complete = {
            name: _gradient(parameter)
            for name, parameter in model.named_parameters()
            if not self._stages_remaining[parameter] and parameter.requires_grad
        }
        _sum_over_tensor_parallel(complete, self._config, self._groups)
        if self._group is None:
            return
        gradients = [*complete.values()]
        for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
            same_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
            rows = join_by_rank(same_dtype, self._group.size())
            if self._config.use_distributed_optimizer:
                work, received = start_scattered_sum(rows, self._group)
            else:
                work = dist.all_reduce(rows, group=self._group, async_op=True)
                received = rows
            assert work is not None, "this rank is one of the replicas"
            self._pending.append((work, received, same_dtype))

    def finish(self) -> None:
        """Wait for the sums and copy them into the gradients.

        Raises:
            PipelineError: a replica did not take part in a sum in time.
        """
        for work, received, gradients in self._pending:
            wait_for(work, "the sum of gradients over replicas", self._config.pipeline_timeout)
            assert self._group is not None, "only a group has sums"
            if received.dim() == 1:
                rows = received.new_zeros(self._group.size(), len(received))
                rows[dist.get_rank(self._group)] = received
                received = rows
            copy_from_rows(received, gradients)
        self._pending = []


def finalize_model_grads(
    models: Sequence[nn.Module], config: TransformerConfig, groups: ProcessGroups, num_tokens: Tensor
) -> None:
    """Turn gradients that are summed over replicas into gradients of the step's loss.

    The gradients of the two copies of a tied embedding are summed. Then all gradients are divided by the number of
    replicas and context ranks, whose losses are means of equally many tokens, or with ``calculate_per_token_loss`` by
    the number of tokens of the whole step.

    Args:
        models: stages of this rank.
        config: configuration of the model.
        groups: process groups of this rank.
        num_tokens: tokens counted on this rank; only those of the last stage are nonzero. []

    Raises:
        PipelineError: a rank did not take part in a sum in time.
    """
    timeout = config.pipeline_timeout
    _sum_tied([_gradient(tied) for model in models if (tied := tied_copy(model)) is not None], groups, timeout)
    divisor: float | Tensor = float(groups.dp_size * groups.cp_size)
    if config.calculate_per_token_loss:
        device = next((parameter.device for model in models for parameter in model.parameters()), num_tokens.device)
        divisor = num_tokens.to(device, copy=True)
        for group in (groups.pp, groups.with_same_stages):
            _sum_over(divisor, group, "the number of tokens", timeout)
        divisor.clamp_(min=1)
    if isinstance(divisor, Tensor) or divisor != 1.0:
        for parameter in _parameters(models):
            if parameter.grad is not None:
                parameter.grad /= divisor


def _sum_tied(gradients: Sequence[Tensor], groups: ProcessGroups, timeout: float) -> None:
    """Replace the gradients of a tied embedding's two copies, on this rank or on two ranks, by their sum."""
    if len(gradients) == 2:
        first, second = gradients
        second.copy_(first.add_(second))
    elif gradients:
        _sum_over(gradients[0], groups.embedding, "the sum of a tied embedding's gradients", timeout)


def _sum_over_tensor_parallel(
    gradients: Mapping[str, Tensor], config: TransformerConfig, groups: ProcessGroups
) -> None:
    """Sum gradients, given by canonical name, of which every tensor-parallel rank has a part."""
    if groups.tp is None:
        return
    splits = splits_of(parameter_specs(unsharded(config)))
    ranks = TensorParallel(groups.tp, config.sequence_parallel, config.pipeline_timeout)
    sum_repeated(gradients, splits, ranks)


def remove_earlier_gradients(models: Sequence[nn.Module]) -> Sequence[tuple[Tensor, Tensor]]:
    """Remove the gradients of earlier steps, which this step must not sum or divide again, and return them."""
    earlier = [(parameter, parameter.grad) for parameter in _parameters(models) if parameter.grad is not None]
    for parameter, _ in earlier:
        parameter.grad = None
    return earlier


def restore_earlier_gradients(models: Sequence[nn.Module], earlier: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Restore the gradients that remove_earlier_gradients removed, and drop those of a failed step."""
    for parameter in _parameters(models):
        parameter.grad = None
    for parameter, gradient in earlier:
        parameter.grad = gradient


def add_earlier_gradients(earlier: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add the gradients of this step in place to those that remove_earlier_gradients removed."""
    for parameter, gradient in earlier:
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def tied_copy(model: nn.Module) -> Tensor | None:
    """Return ``embedding.weight`` of a stage, which two stages share if it is tied, or None."""
    embedding = getattr(model, "embedding", None)
    return None if embedding is None else embedding.weight


def _sum_over(tensor: Tensor, group: ProcessGroup | None, what: str, timeout: float) -> None:
    """Replace a tensor by its sum over a group, if there is one."""
    if group is not None:
        wait_for(dist.all_reduce(tensor, group=group, async_op=True), what, timeout)


def _parameters(models: Sequence[nn.Module]) -> list[Tensor]:
    """Return all parameters without duplicates, since stages of one rank may share some."""
    return [*dict.fromkeys(parameter for model in models for parameter in model.parameters())]


def _gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter; create zeros if it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    return parameter.grad
