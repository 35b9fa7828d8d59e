"""Pipeline parallelism in PyTorch: each rank is a process that runs its part of a schedule table.

The mirrored package ``jax_impl/pipeline`` runs the same tables as one program on all devices. Names and contracts are
those of Megatron-core's pipeline_parallel; docs/pipeline.md lists the differences.
"""

from diptych.plans.schedule.messages import PipelineError
from diptych.plans.schedule.named import convert_schedule_table_to_order, get_schedule_table
from reference_torch.p2p import P2PCommunicator
from reference_torch.pipeline.module_executor import PipelineExecutor, split_batch
from reference_torch.pipeline.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
    get_model,
    get_pp_rank_microbatches,
    infer_tensor_shapes,
)
from reference_torch.pipeline.split_backward import DeferredWeightGradients
from reference_torch.pipeline.split_model import split_model
from reference_torch.pipeline.steps import (
    backward_step,
    custom_backward,
    deallocate_output_tensor,
    forward_step,
    forward_step_calc_loss,
    own_memory,
)

__all__ = [
    "DeferredWeightGradients",
    "P2PCommunicator",
    "PipelineError",
    "PipelineExecutor",
    "backward_step",
    "convert_schedule_table_to_order",
    "custom_backward",
    "deallocate_output_tensor",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "forward_step",
    "forward_step_calc_loss",
    "get_forward_backward_func",
    "get_model",
    "get_pp_rank_microbatches",
    "get_schedule_table",
    "infer_tensor_shapes",
    "own_memory",
    "split_batch",
    "split_model",
]
