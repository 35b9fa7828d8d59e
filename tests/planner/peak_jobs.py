"""What ranks run to measure the peak of a step."""

import torch

from diptych.plans.config import TransformerConfig
from diptych.plans.offload import rank_uses
from reference_torch.p2p import P2PCommunicator
from reference_torch.pending_sends import PendingSends
from reference_torch.pipeline import get_forward_backward_func, get_model
from reference_torch.recompute import measure_memory
from reference_torch.stage import model_provider, offload_layers
from tests.pipeline.jobs import Case, forward_step, groups_of, microbatches
from tests.planner.host_memory import uncounted_host


def measure_step(config: TransformerConfig, count: int, size: int) -> int:
    """Most bytes of a pipeline rank in a step, above parameters and batches."""
    groups = groups_of(config)
    built = get_model(lambda **ends: model_provider(config, **ends), config, groups.pp_rank)
    stages = built if isinstance(built, list) else [built]
    data = microbatches(Case(config, count, size))
    assert groups.pp is not None
    link = P2PCommunicator(groups.pp, config)
    link._senders = PendingSends(lingers=True)  # the profiler does not see what another thread frees
    manager = offload_layers(stages, config)

    def step() -> None:
        manager.expect(rank_uses(config, count, groups.pp_rank))
        get_forward_backward_func(config)(
            forward_step_func=forward_step,
            data_iterator=[iter(data) for _ in stages] if isinstance(built, list) else iter(data),
            model=built,
            num_microbatches=count,
            seq_length=config.seq_length,
            micro_batch_size=size,
            config=config,
            p2p_communicator=link,
            pg_collection=groups,
        )
        for stage in stages:
            stage.zero_grad()

    def run() -> torch.Tensor:
        step()
        return torch.zeros(())

    with uncounted_host():
        step()
        found = [measure_memory(run, lambda _: None).peak for _ in range(3)]
    link.close()
    manager.close()
    return min(found)
