"""Training steps of a pipeline, with the function names of Megatron-core.

get_forward_backward_func selects one of the three step functions for a configuration. Each of them passes the schedule
table of the configuration to the same executor.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import PIPELINED
from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.named import num_warmup_microbatches, schedule_for
from diptych.plans.schedule.partition import is_pipeline_first_stage, is_pipeline_last_stage
from reference_torch.context_parallel.wavefront import finish
from reference_torch.groups import ProcessGroups
from reference_torch.p2p import P2PCommunicator, Shape
from reference_torch.pipeline.executor import Executor
from reference_torch.pipeline.forward_step_stages import ForwardStepStages, StepInputs
from reference_torch.pipeline.gradients import (
    GradientSums,
    add_earlier_gradients,
    finalize_model_grads,
    remove_earlier_gradients,
    restore_earlier_gradients,
)
from reference_torch.pipeline.steps import ForwardStep

AdjustShapes = Callable[[list[Shape], list[Shape]], tuple[list[Shape], list[Shape]]]
DataIterator = Iterator[Any] | Sequence[Iterator[Any]] | None


def get_model(model_provider: Callable[..., nn.Module], config: TransformerConfig, pp_rank: int = 0) -> Any:
    """Build the model of one rank: the whole model, one stage, or a list of virtual stages.

    Args:
        model_provider: called as ``model_provider(pre_process=, post_process=, vp_stage=, pp_rank=)``.
        config: configuration of the model.
        pp_rank: pipeline rank of this process.
    """

    def build(vp_stage: int | None) -> nn.Module:
        return model_provider(
            pre_process=is_pipeline_first_stage(config, vp_stage, pp_rank),
            post_process=is_pipeline_last_stage(config, vp_stage, pp_rank),
            vp_stage=vp_stage,
            pp_rank=pp_rank,
        )

    virtual = config.virtual_pipeline_model_parallel_size or 1
    return build(None) if virtual == 1 else [build(vp_stage) for vp_stage in range(virtual)]


def get_forward_backward_func(config: TransformerConfig) -> Callable[..., list[Any]]:
    """Return the function that runs the steps of a configuration."""
    return {
        _NONE: forward_backward_no_pipelining,
        _ONE_STAGE: forward_backward_pipelining_without_interleaving,
        _VIRTUAL: forward_backward_pipelining_with_interleaving,
    }[_kind_of(config)]


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStep,
    data_iterator: DataIterator,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    config: TransformerConfig,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: ProcessGroups | None = None,
    trace: list[Action] | None = None,
) -> list[Any]:
    """Run a step of a whole model: forward and backward of one microbatch after the other.

    Arguments and result are those of forward_backward_pipelining_without_interleaving.
    """
    _check_kind(config, _NONE)
    step = _Step(forward_step_func, data_iterator, model, num_microbatches, config)
    return _run(step, [([], [])], forward_only, collect_non_loss_data, p2p_communicator, pg_collection, trace)


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: ForwardStep,
    data_iterator: DataIterator,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    config: TransformerConfig,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    adjust_tensor_shapes_fn: AdjustShapes | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: ProcessGroups | None = None,
    trace: list[Action] | None = None,
) -> list[Any]:
    """Run a step with one stage for each rank and add its gradients to ``parameter.grad``.

    Args:
        forward_step_func: ``(data_iterator, model) -> (output, reducer)``; see forward_step_calc_loss for the values
            that the reducer may return.
        data_iterator: microbatches in order; every rank has its own iterator over all of them.
        model: stage of this rank.
        num_microbatches: number of microbatches of the step, m.
        seq_length: tokens of a sequence, T.
        micro_batch_size: sequences of a microbatch, B.
        config: configuration of the model.
        forward_only: if True, run no backward; the caller uses torch.no_grad.
        collect_non_loss_data: collect other results of the reducers instead of losses; requires forward_only.
        adjust_tensor_shapes_fn: changes the result of infer_tensor_shapes: (received, sent) -> (received, sent).
        p2p_communicator: communicator for all steps; None: a new one for this step.
        pg_collection: process groups of this rank; None: only without a pipeline.
        trace: list to which every action is appended after it has run.

    Returns:
        The reports of the reducers, one for each microbatch, on the rank of the last stage; [] on other ranks.

    Raises:
        ValueError: the schedule does not support the sizes or the arguments, or the output or loss of a stage cannot
            be sent or differentiated.
        PipelineError: a message did not arrive or was not received within config.pipeline_timeout, or a value saved
            for backward was changed in place.
        Exception: an error of a stage, with a note that names the action. After an error, the gradients are those
            before the step.
    """
    _check_kind(config, _ONE_STAGE)
    received, sent = infer_tensor_shapes(seq_length, micro_batch_size, config)
    if adjust_tensor_shapes_fn is not None:
        received, sent = adjust_tensor_shapes_fn(received, sent)
    step = _Step(forward_step_func, data_iterator, model, num_microbatches, config)
    return _run(step, [(received, sent)], forward_only, collect_non_loss_data, p2p_communicator, pg_collection, trace)


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: ForwardStep,
    data_iterator: DataIterator,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    config: TransformerConfig,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: ProcessGroups | None = None,
    trace: list[Action] | None = None,
) -> list[Any]:
    """Run a step with several virtual stages for each rank.

    Arguments and result are those of forward_backward_pipelining_without_interleaving, but ``data_iterator`` and
    ``model`` are lists with one entry for each virtual stage.
    """
    _check_kind(config, _VIRTUAL)
    step = _Step(forward_step_func, data_iterator, model, num_microbatches, config)
    shapes = [infer_tensor_shapes(seq_length, micro_batch_size, config)]
    shapes *= config.virtual_pipeline_model_parallel_size or 1
    return _run(step, shapes, forward_only, collect_non_loss_data, p2p_communicator, pg_collection, trace)


def infer_tensor_shapes(
    seq_length: int, micro_batch_size: int, config: TransformerConfig
) -> tuple[list[Shape], list[Shape]]:
    """Return the shapes of the tensors that a stage receives and sends.

    Both are one tensor [B, T, S * D] with all residual streams concatenated, and with moe_aux_loss_coeff one more
    element per token. Context ranks hold a part of the concatenated sequences, [1, B * T / R, S * D], and with sequence
    parallelism tensor-parallel ranks a part of these tokens.

    Args:
        seq_length: tokens of a sequence, T.
        micro_batch_size: sequences of a microbatch, B.
        config: configuration of the model.
    """
    cp = config.context_parallel_size
    rows = (micro_batch_size, seq_length) if cp == 1 else (1, micro_batch_size * seq_length // cp)
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shape = (rows[0], rows[1] // parts, config.stage_width)
    return [shape], [shape]


def get_pp_rank_microbatches(
    num_microbatches: int, config: TransformerConfig, pp_rank: int, forward_only: bool = False
) -> tuple[int, bool, int, int]:
    """Return the number of forwards of a rank, whether all are warm-up, the number in warm-up, and the number after it.

    Args:
        num_microbatches: number of microbatches of the step.
        config: configuration of the model.
        pp_rank: pipeline rank.
        forward_only: if True, the step has no backward.
    """
    p = config.pipeline_model_parallel_size
    v = config.virtual_pipeline_model_parallel_size or 1
    total = num_microbatches * v
    if config.schedule_name in ("none", "1f1b", "interleaved", "zb-h1") or forward_only:
        group = config.microbatch_group_size_per_vp_stage
        warmup = num_warmup_microbatches(pp_rank, p, num_microbatches, v, group, forward_only)
    else:  # the last forward before the first backward belongs to the steady state
        kinds = [action.kind for action in schedule_for(config, num_microbatches).actions[pp_rank]]
        num_leading = next(index for index, kind in enumerate(kinds) if kind != "F")
        warmup = num_leading if num_leading == total else num_leading - 1
    return total, warmup == total, warmup, total - warmup


class _Step(NamedTuple):
    """Arguments that all step functions have; see forward_backward_pipelining_without_interleaving."""

    forward_step_func: ForwardStep
    data_iterator: DataIterator
    model: nn.Module | Sequence[nn.Module]
    num_microbatches: int
    config: TransformerConfig


def _run(
    step: _Step,
    shapes: Sequence[tuple[Sequence[Shape], Sequence[Shape]]],
    forward_only: bool,
    collect_non_loss_data: bool,
    communicator: P2PCommunicator | None,
    groups: ProcessGroups | None,
    trace: list[Action] | None,
) -> list[Any]:
    """Run a step of any kind.

    Args:
        step: arguments of the public function.
        shapes: shapes that each virtual stage receives and sends.
        forward_only: see the public functions.
        collect_non_loss_data: see the public functions.
        communicator: see p2p_communicator of the public functions.
        groups: see pg_collection of the public functions.
        trace: see the public functions.
    """
    forward_step_func, data_iterator, model, num_microbatches, config = step
    if collect_non_loss_data and not forward_only:
        raise ValueError(
            "collect_non_loss_data: expected False without forward_only, since it leaves no loss to start a backward "
            "from, got True; give forward_only=True"
        )
    context_rank = 0 if groups is None or groups.cp is None else dist.get_rank(groups.cp)
    schedule = schedule_for(config, num_microbatches, forward_only, context_rank)
    models = [*model] if isinstance(model, Sequence) else [model]
    iterators = [*data_iterator] if isinstance(data_iterator, Sequence) else [data_iterator]
    for name, items in (("model", models), ("data_iterator", iterators)):
        if len(items) != schedule.stages_per_rank:
            raise ValueError(
                f"{name}: expected {schedule.stages_per_rank}, one for each virtual stage of the rank, got {len(items)}"
            )
    groups = groups or ProcessGroups()
    step_communicator = _make_communicator(config, groups, models) if communicator is None else None
    communicator = communicator or step_communicator
    sums = GradientSums(groups, config, models)
    inputs = StepInputs(forward_step_func, iterators, models, config, shapes, collect_non_loss_data)
    stages = ForwardStepStages(schedule, 0 if communicator is None else communicator.rank, inputs, sums)
    executor = Executor(schedule, stages, communicator, trace)
    earlier = [] if forward_only else remove_earlier_gradients(models)
    try:
        executor.run()
        if config.cp_exchange == PIPELINED:
            finish(groups.cp)
        if not forward_only:
            sums.finish()
            finalize_model_grads(models, config, groups, stages.num_tokens)
    except BaseException:
        if not forward_only:
            restore_earlier_gradients(models, earlier)
        if step_communicator is not None:
            step_communicator.dismiss()
        raise
    if step_communicator is not None:
        step_communicator.close()
    add_earlier_gradients(earlier)
    return stages.reports


def _make_communicator(
    config: TransformerConfig, groups: ProcessGroups, models: Sequence[nn.Module]
) -> P2PCommunicator | None:
    """Return a communicator for one step, or None without a pipeline."""
    if config.pipeline_model_parallel_size == 1:
        return None
    if groups.pp is None:
        raise ValueError(
            "pg_collection: expected this rank's groups with pipeline_model_parallel_size="
            f"{config.pipeline_model_parallel_size}, got none; make them by reference_torch.groups.make_groups"
        )
    device = next((parameter.device for parameter in models[0].parameters()), "cpu")
    return P2PCommunicator(groups.pp, config, device)


_NONE = "no pipeline"
_ONE_STAGE = "one stage per rank"
_VIRTUAL = "virtual stages"


def _kind_of(config: TransformerConfig) -> str:
    """Return the kind of a configuration's pipeline, which selects the step function."""
    if config.pipeline_model_parallel_size == 1:
        return _NONE
    return _ONE_STAGE if (config.virtual_pipeline_model_parallel_size or 1) == 1 else _VIRTUAL


def _check_kind(config: TransformerConfig, expected: str) -> None:
    """Raise a ValueError if a step function is called with a configuration of another kind."""
    if _kind_of(config) != expected:
        raise ValueError(
            f"config: expected {expected} with this function, got {_kind_of(config)}, schedule "
            f"{config.schedule_name!r}; choose the function by get_forward_backward_func(config)"
        )
