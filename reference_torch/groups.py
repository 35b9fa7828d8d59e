"""Process groups of pipeline, context and data parallel ranks, and communication of objects between all ranks.

diptych.plans.mesh.MESH_AXES defines the order of the ranks.
"""

import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diptych.plans.checkpoint import CheckpointError
from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import MESH_AXES, mesh_shape, replica_settings
from diptych.plans.schedule.messages import PipelineError
from diptych.plans.schedule.partition import get_stage_place, num_stages

Result = TypeVar("Result")


class ProcessGroups(NamedTuple):
    """The process groups of a rank."""

    pp: ProcessGroup | None = None
    """Pipeline ranks of this replica, in the order of their stages; None: there is no pipeline."""
    dp: ProcessGroup | None = None
    """Ranks with the same stages and other sequences (replicas); None: there is one replica."""
    embedding: ProcessGroup | None = None
    """Ranks of the first and the last stage, which share a tied embedding; None on other ranks, or if one rank has
    both."""
    cp: ProcessGroup | None = None
    """Ranks with the same stages that share the sequences of this rank, in order of their parts; None: there is one."""
    dp_cp: ProcessGroup | None = None
    """All ranks with the same stages and the same part of them; None without context parallelism."""
    tp: ProcessGroup | None = None
    """Ranks that share the layers of this rank, in the order of their parts; None: there is one."""

    @property
    def pp_rank(self) -> int:
        """Pipeline rank of this process."""
        return 0 if self.pp is None else dist.get_rank(self.pp)

    @property
    def dp_rank(self) -> int:
        """Replica of this process."""
        return 0 if self.dp is None else dist.get_rank(self.dp)

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return 1 if self.dp is None else self.dp.size()

    @property
    def cp_size(self) -> int:
        """Number of context ranks that share a sequence."""
        return 1 if self.cp is None else self.cp.size()

    @property
    def tp_rank(self) -> int:
        """Part of the layers that this process has."""
        return 0 if self.tp is None else dist.get_rank(self.tp)

    @property
    def with_same_stages(self) -> ProcessGroup | None:
        """Ranks with the same stages, over which gradients are summed."""
        return self.dp if self.cp is None else self.dp_cp


def make_mesh(config: TransformerConfig, device_type: str = "cpu") -> DeviceMesh | None:
    """Return the mesh of all processes with the axes of diptych.plans.mesh.MESH_AXES, or None for one process.

    Args:
        config: configuration of the model.
        device_type: device type of the mesh.

    Raises:
        ValueError: the number of processes is not a multiple of the size of one replica.
    """
    size = world_size()
    check_world_size(config, size)
    return None if size == 1 else init_device_mesh(device_type, mesh_shape(config, size), mesh_dim_names=MESH_AXES)


def make_groups(config: TransformerConfig, mesh: DeviceMesh | None) -> ProcessGroups:
    """Create the process groups of a mesh; every rank calls this function in the same order as other collectives.

    Args:
        config: configuration of the model.
        mesh: mesh of make_mesh; None: one process.
    """
    if mesh is None:
        return ProcessGroups()
    pp, dp, cp, tp = (mesh.get_group(name) if axis_size(mesh, name) > 1 else None for name in ("pp", "dp", "cp", "tp"))
    ranks = _ranks_by_axis(mesh)
    embedding = None
    last = get_stage_place(config, num_stages(config) - 1).pp_rank
    if last != 0 and not config.untie_embeddings_and_output_weights:
        pipelines = ranks.permute(0, 1, 3, 2).flatten(0, 2)  # [dp * cp * tp, pp]
        embedding = _own_group([[pipeline[0], pipeline[last]] for pipeline in pipelines.tolist()])
    same_parameters = ranks.flatten(0, 1).flatten(1).T  # [pp * tp, dp * cp]
    return ProcessGroups(pp, dp, embedding, cp, None if cp is None else _own_group(same_parameters.tolist()), tp)


def _ranks_by_axis(mesh: DeviceMesh) -> torch.Tensor:
    """Return the ranks of a mesh as an array with all of MESH_AXES, [dp, cp, pp, tp]; a missing axis has size 1."""
    names = mesh.mesh_dim_names or ()
    if list(names) != [name for name in MESH_AXES if name in names]:
        raise ValueError(f"mesh: expected axes out of {MESH_AXES} in this order, got {names}")
    return mesh.mesh.reshape([axis_size(mesh, name) for name in MESH_AXES])


def axis_size(mesh: DeviceMesh | None, name: str) -> int:
    """Return the number of ranks along an axis, or 1 if the mesh has no axis of that name."""
    return mesh[name].size() if mesh is not None and name in (mesh.mesh_dim_names or ()) else 1


def _own_group(groups: list[list[int]]) -> ProcessGroup | None:
    """Create several groups on every rank and return the one that contains this rank, or None."""
    created = [dist.new_group(ranks) for ranks in groups]
    own = [group for ranks, group in zip(groups, created, strict=True) if dist.get_rank() in ranks]
    return cast("ProcessGroup", own[0]) if own else None


def world_size() -> int:
    """Return the number of processes, or 1 without a default process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_world_size(config: TransformerConfig, size: int) -> None:
    """Check that the number of processes is a multiple of the size of one replica.

    Args:
        config: configuration of the model.
        size: number of processes.

    Raises:
        ValueError: it is not a multiple.
    """
    n = config.model_parallel_size
    if size % n:
        raise ValueError(
            f"{replica_settings(config)}: expected a divisor of the number of processes, {size}, got {n}; start a "
            f"multiple of {n} (diptych train --nproc {n}, or torchrun --nproc-per-node {n})"
        )


def sum_over(value: torch.Tensor, group: ProcessGroup | None, what: str, timeout: float) -> torch.Tensor:
    """Return the sum of a value over a group, or the value itself without a group.

    Args:
        value: value of this rank.
        group: the ranks.
        what: name of the sum, for error messages.
        timeout: seconds to wait for the other ranks.

    Raises:
        PipelineError: a rank did not take part in time.
    """
    if group is None:
        return value
    value = value.clone()
    wait_for(dist.all_reduce(value, group=group, async_op=True), what, timeout)
    return value


def wait_for(work: dist.Work | None, what: str, timeout: float) -> None:
    """Wait for a collective or a message with a timeout, because a failed rank does not take part in it.

    Args:
        work: the collective or message.
        what: name of the expected result, for error messages.
        timeout: seconds.

    Raises:
        PipelineError: a rank did not take part in time.
    """
    assert work is not None, "this rank is in its own groups"
    try:
        work.wait(datetime.timedelta(seconds=timeout))
    except RuntimeError as error:
        raise PipelineError(
            f"rank {dist.get_rank()}: expected {what} within pipeline_timeout={timeout:g} s, but it did not arrive "
            f"({str(error).splitlines()[0]}); see the output of the other ranks, or raise pipeline_timeout "
            "(for a cp_context that you built, its field timeout)"
        ) from None


SCATTER, GATHER = (
    ("reduce_scatter_single", "all_gather_single")
    if hasattr(dist, "reduce_scatter_single")
    else ("reduce_scatter_tensor", "all_gather_into_tensor")
)
"""Names of two collectives in torch.distributed, which PyTorch 2.13 renamed."""


def start_scattered_sum(rows: torch.Tensor, group: ProcessGroup) -> tuple[dist.Work | None, torch.Tensor]:
    """Start to sum rows over ranks, and return the work and the sum of this rank's row.

    Args:
        rows: a row for each rank. [ranks, n]
        group: the ranks.
    """
    own = rows.new_empty(rows.shape[1])
    return getattr(dist, SCATTER)(own, rows.flatten(), group=group, async_op=True), own


def gather_rows(own: torch.Tensor, group: ProcessGroup, what: str, timeout: float) -> torch.Tensor:
    """Return the rows of all ranks, [ranks, n].

    Args:
        own: row of this rank. [n]
        group: the ranks.
        what: name of the rows, for error messages.
        timeout: seconds to wait for the other ranks.

    Raises:
        PipelineError: a rank did not take part in time.
    """
    rows = own.new_empty(group.size() * len(own))
    wait_for(getattr(dist, GATHER)(rows, own, group=group, async_op=True), what, timeout)
    return rows.view(group.size(), -1)


def gather(mapping: dict[str, Any], group: ProcessGroup | None) -> dict[str, Any]:
    """Return the entries of all ranks' dictionaries; for a name on several ranks, the entry of the first rank.

    Args:
        mapping: dictionary of this rank.
        group: the ranks; None: this rank alone.
    """
    return {name: value for part in reversed(gather_parts(mapping, group)) for name, value in part.items()}


def gather_parts(mapping: Mapping[str, Any], group: ProcessGroup | None) -> list[Any]:
    """Return the dictionaries of all ranks, in the order of their ranks.

    Args:
        mapping: dictionary of this rank.
        group: the ranks; None: this rank alone.
    """
    if group is None:
        return [mapping]
    parts: list[Any] = [None] * group.size()
    with _named("the arrays of all ranks of a model"):
        dist.all_gather_object(parts, mapping, group=group)
    return parts


def gather_texts(text: str, groups: ProcessGroups) -> list[str]:
    """Return the texts of all processes, in order of their ranks, on every process.

    Args:
        text: text of this process.
        groups: process groups of this rank.
    """
    if groups == ProcessGroups():
        return [text]
    texts: list[Any] = [None] * world_size()
    with _named("what every rank has found"):
        dist.all_gather_object(texts, text)
    return texts


def on_first_rank(write: Callable[[], Result], groups: ProcessGroups) -> Result:
    """Call a function on the first process only, and return its result or raise its error on every process.

    Args:
        write: the function.
        groups: process groups of this rank.

    Raises:
        CheckpointError: with several processes, the function raised an error; the message is that of the error.
        PipelineError: the first process has ended.
    """
    if groups == ProcessGroups():
        return write()
    outcome: list[Any] = [None, ""]
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = write()
        except Exception as error:  # any error: the other processes must not wait for a failed call
            cause = error
            outcome[1] = str(error) or repr(error)  # its text, because not every error can be pickled
    with _named("the result of writing from rank 0"):
        dist.broadcast_object_list(outcome)
    if outcome[1]:
        raise CheckpointError(outcome[1]) from cause
    return outcome[0]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Raise a PipelineError that names the expected object if another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(
            f"rank {dist.get_rank()}: expected {what}, but it did not arrive ({str(error).splitlines()[0]}); see "
            "the output of the other ranks"
        ) from None
