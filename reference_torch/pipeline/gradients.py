"""What is left to do to gradients once a step's microbatches are through: sum them over all ranks that hold a copy."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from diptych.plans.config import TransformerConfig
from reference_torch.groups import ProcessGroups, wait_for


class GradientSums:
    """Starts summing a stage's gradients as soon as they are complete, once a step.

    Args:
        group: the ranks that hold the stage, replicas and those that share sequences; None: there is one.
        timeout: seconds a sum may take.
        models: this rank's stages. A parameter of several is summed with the last of them to be complete.
    """

    def __init__(self, group: ProcessGroup | None, timeout: float, models: Sequence[nn.Module]) -> None:
        self._group, self._timeout = group, timeout
        self._incomplete = Counter(parameter for model in models for parameter in model.parameters())
        self._under_way: list[tuple[dist.Work, Tensor, list[Tensor]]] = []

    def start(self, model: nn.Module) -> None:
        """Sum all gradients of a stage; its last backward is over."""
        if self._group is None:
            return
        self._incomplete.subtract(model.parameters())
        complete = [parameter for parameter in model.parameters() if not self._incomplete[parameter]]
        gradients = [_gradient(parameter) for parameter in complete if parameter.requires_grad]
        for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in alike])
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None, "this rank is one of the replicas"
            self._under_way.append((work, flat, alike))

    def finish(self) -> None:
        """Wait for the sums, and write them back.

        Raises:
            PipelineError: some replica did not come to its sum in time.
        """
        for work, flat, gradients in self._under_way:
            wait_for(work, "the sum of gradients over replicas", self._timeout)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._under_way = []


def finalize_model_grads(
    models: Sequence[nn.Module], config: TransformerConfig, groups: ProcessGroups, num_tokens: Tensor
) -> None:
    """Make the gradients those of the step's loss, on every rank, after those of ranks alike have been summed.

    Sums the two copies of a tied embedding; divides by the number of ranks summed over, whose losses are means of
    equally many tokens, or with ``calculate_per_token_loss`` by the tokens of the whole step.

    Args:
        models: this rank's stages.
        config: the model's.
        groups: this rank's.
        num_tokens: counted on this rank; only the last stage's count.

    Raises:
        PipelineError: some rank did not come to a sum in time.
    """
    timeout = config.pipeline_timeout
    _sum_tied([_gradient(tied) for model in models if (tied := tied_copy(model)) is not None], groups, timeout)
    divisor: float | Tensor = float(groups.dp_size * groups.cp_size)
    if config.calculate_per_token_loss:
        device = next((parameter.device for model in models for parameter in model.parameters()), num_tokens.device)
        divisor = num_tokens.to(device, copy=True)
        for group in (groups.pp, groups.alike):
            _sum_over(divisor, group, "the number of tokens", timeout)
        divisor.clamp_(min=1)
    if isinstance(divisor, Tensor) or divisor != 1.0:
        for parameter in _parameters(models):
            if parameter.grad is not None:
                parameter.grad /= divisor


def _sum_tied(gradients: Sequence[Tensor], groups: ProcessGroups, timeout: float) -> None:
    """Replace the gradients of a tied embedding's two copies by their sum: both are here, or one is on another rank."""
    if len(gradients) == 2:
        first, second = gradients
        second.copy_(first.add_(second))
    elif gradients:
        _sum_over(gradients[0], groups.embedding, "the sum of a tied embedding's gradients", timeout)


def set_aside(models: Sequence[nn.Module]) -> Sequence[tuple[Tensor, Tensor]]:
    """Take the gradients of earlier steps from the parameters: this step's sums and divisions are not theirs."""
    earlier = [(parameter, parameter.grad) for parameter in _parameters(models) if parameter.grad is not None]
    for parameter, _ in earlier:
        parameter.grad = None
    return earlier


def put_back(models: Sequence[nn.Module], earlier: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Leave only what was set aside: this step failed."""
    for parameter in _parameters(models):
        parameter.grad = None
    for parameter, gradient in earlier:
        parameter.grad = gradient


def add_back(earlier: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add this step's gradients to what was set aside, in its memory."""
    for parameter, gradient in earlier:
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def tied_copy(model: nn.Module) -> Tensor | None:
    """The embedding's weight on a stage that shares it with another: ``embedding.weight``; None: it has none."""
    embedding = getattr(model, "embedding", None)
    return None if embedding is None else embedding.weight


def _sum_over(tensor: Tensor, group: ProcessGroup | None, what: str, timeout: float) -> None:
    """Replace a tensor by its sum over a group."""
    if group is not None:
        wait_for(dist.all_reduce(tensor, group=group, async_op=True), what, timeout)


def _parameters(models: Sequence[nn.Module]) -> list[Tensor]:
    """All parameters, each once: stages of one rank may share some."""
    return [*dict.fromkeys(parameter for model in models for parameter in model.parameters())]


def _gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient; zeros where nothing has reached it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
