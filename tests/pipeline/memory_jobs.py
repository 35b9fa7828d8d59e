"""What ranks keep of what they have sent, and what they refuse to send."""

from typing import Any

import torch

from diptych.plans.config import TransformerConfig
from reference_torch.p2p import P2PCommunicator
from reference_torch.pipeline import get_forward_backward_func
from tests.pipeline.jobs import groups_of
from tests.pipeline.toy_jobs import toy_data


class Wide(torch.nn.Module):
    """A stage whose output is large, and whose backward keeps nothing of that size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.weight = size, torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.entered = input_tensor

    def forward(self, data: torch.Tensor) -> Any:
        return self.weight + torch.zeros(1, 1, self.size, dtype=torch.float64) + getattr(self, "entered", 0.0)


def kept_bytes(config: TransformerConfig, count: int, size: int) -> int:
    """Of a stage's outputs, when its last forward is over."""
    groups = groups_of(config)
    outputs: list[torch.Tensor] = []
    peak = 0

    def step(data_iterator: Any, model: Any) -> Any:
        nonlocal peak
        output = model(next(data_iterator))
        outputs.append(output)
        peak = max(peak, sum(x.untyped_storage().nbytes() for x in outputs))
        return output, lambda out: (out.mean(), out.mean())

    get_forward_backward_func(config)(
        forward_step_func=step,
        data_iterator=iter(toy_data(count)),
        model=Wide(size),
        num_microbatches=count,
        seq_length=3,
        micro_batch_size=1,
        config=config,
        adjust_tensor_shapes_fn=lambda received, sent: ([(1, 1, size)], [(1, 1, size)]),
        pg_collection=groups,
    )
    return peak


def refused_sends(config: TransformerConfig) -> list[str]:
    """What a communicator says of tensors that the other rank does not expect."""
    groups = groups_of(config)
    assert groups.pp is not None
    link, errors = P2PCommunicator(groups.pp, config), []
    for tensors in ([torch.ones(1, 3, 4, dtype=torch.float32)], [torch.ones(1, dtype=torch.float64)] * 9):
        try:
            link.send_forward(tensors, is_last_stage=False)
            link.send_backward(tensors, is_first_stage=True)
        except ValueError as error:
            errors.append(str(error))
    return errors
