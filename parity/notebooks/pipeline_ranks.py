"""PyTorch's part of notebook 04, which every rank of a RankPool executes."""

from typing import NamedTuple

import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.model.data import Batch
from diptych.plans.schedule.actions import Action
from reference_torch.groups import make_groups, make_mesh
from reference_torch.pipeline import get_forward_backward_func, get_model
from reference_torch.stage import Microbatch, forward_step, model_provider


class Outcome(NamedTuple):
    """Results of one rank after a step."""

    losses: list[float]
    """Losses of the microbatches on the rank of the last stage; [] on other ranks."""
    gradients: dict[str, np.ndarray]
    """Gradients of this rank's parameters, by canonical name."""
    trace: list[Action]
    """Actions of the rank, in the order of execution."""


def training_steps(configs: list[TransformerConfig], tokens: np.ndarray, targets: np.ndarray) -> list[Outcome]:
    """Run one step of each configuration from its initial parameters.

    Args:
        configs: configurations with as many pipeline ranks as the pool has.
        tokens: token ids of m microbatches. [m, b, T]
        targets: next tokens. [m, b, T]
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
