"""What notebook 04 runs on PyTorch's ranks: every function here is called on all ranks of a RankPool alike."""

from typing import NamedTuple

import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.model.data import Batch
from diptych.plans.schedule.actions import Action
from reference_torch.groups import make_groups, make_mesh
from reference_torch.pipeline import get_forward_backward_func, get_model
from reference_torch.stage import Microbatch, forward_step, model_provider


class Outcome(NamedTuple):
    """What one rank has after a step."""

    losses: list[float]
    """Of the microbatches, on the rank of the last stage; elsewhere []."""
    gradients: dict[str, np.ndarray]
    """Of this rank's parameters, by canonical name."""
    trace: list[Action]
    """What the rank ran, in order."""


def training_steps(configs: list[TransformerConfig], tokens: np.ndarray, targets: np.ndarray) -> list[Outcome]:
    """A step of each configuration from its initial parameters.

    Args:
        configs: all with as many pipeline ranks as the pool has.
        tokens, targets: [m, b, T], m microbatches.
    """
    groups = make_groups(configs[0], make_mesh(configs[0]))
    outcomes = []
    for config in configs:
        model = get_model(lambda config=config, **ends: model_provider(config, **ends), config, groups.pp_rank)
        stages = model if isinstance(model, list) else [model]
        count, size, length = tokens.shape
        parts = [Microbatch(Batch(tokens[i], targets[i]), 0, i * size, True) for i in range(count)]
        trace: list[Action] = []
        losses = get_forward_backward_func(config)(
            forward_step_func=forward_step,
            data_iterator=[iter(parts) for _ in stages] if isinstance(model, list) else iter(parts),
            model=model,
            num_microbatches=count,
            seq_length=length,
            micro_batch_size=size,
            config=config,
            pg_collection=groups,
            trace=trace,
        )
        gradients = {name: p.grad.numpy().copy() for stage in stages for name, p in stage.named_parameters()}
        outcomes.append(Outcome([loss.item() for loss in losses], gradients, trace))
    return outcomes
