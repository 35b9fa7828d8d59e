"""Which ranks work together: of a pipeline, of the parts of a sequence, replicas; see
diptych.plans.mesh.MESH_AXES."""

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import MESH_AXES, mesh_shape, model_parallel_words
from diptych.plans.schedule.messages import PipelineError
from diptych.plans.schedule.partition import get_stage_place, num_stages

Result = TypeVar("Result")


class ProcessGroups(NamedTuple):
    """What a rank needs to know of the others."""

    pp: ProcessGroup | None = None
    """The ranks that hold this replica's stages, in order; None: one process holds all."""
    dp: ProcessGroup | None = None
    """The ranks that hold the same stages and learn from other sequences; None: there is one replica."""
    embedding: ProcessGroup | None = None
    """The ranks of the first and the last stage, which share a tied embedding; None on others, and where there are not
    two such ranks."""
    cp: ProcessGroup | None = None
    """The ranks that hold the same stages and share this one's sequences, in order of their parts; None: it has all."""
    dp_cp: ProcessGroup | None = None
    """Both: all that hold the same stages. Used where there is a cp."""

    @property
    def pp_rank(self) -> int:
        """This process's pipeline rank."""
        return 0 if self.pp is None else dist.get_rank(self.pp)

    @property
    def dp_rank(self) -> int:
        """This process's replica."""
        return 0 if self.dp is None else dist.get_rank(self.dp)

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return 1 if self.dp is None else self.dp.size()

    @property
    def cp_size(self) -> int:
        """Ranks that share a sequence."""
        return 1 if self.cp is None else self.cp.size()

    @property
    def alike(self) -> ProcessGroup | None:
        """The ranks that hold the same stages, over which gradients are summed."""
        return self.dp if self.cp is None else self.dp_cp


def make_mesh(config: TransformerConfig, device_type: str = "cpu") -> DeviceMesh | None:
    """All processes as a mesh of replicas, context and pipeline ranks, axes ("dp", "cp", "pp"); None: there is one.

    Raises:
        ValueError: their number is no multiple of what one replica takes.
    """
    size = world_size()
    check_world_size(config, size)
    return None if size == 1 else init_device_mesh(device_type, mesh_shape(config, size), mesh_dim_names=MESH_AXES)


def make_groups(config: TransformerConfig, mesh: DeviceMesh | None) -> ProcessGroups:
    """The groups of a mesh. Every rank has to call it, in the same order as other collectives."""
    if mesh is None:
        return ProcessGroups()
    pp, dp, cp = (mesh.get_group(name) if axis_size(mesh, name) > 1 else None for name in ("pp", "dp", "cp"))
    ranks = mesh.mesh.flatten(0, -2)  # [dp * cp, pp]
    embedding = None
    last = get_stage_place(config, num_stages(config) - 1).pp_rank
    if last != 0 and not config.untie_embeddings_and_output_weights:
        embedding = _own_group([[pipeline[0], pipeline[last]] for pipeline in ranks.tolist()])
    return ProcessGroups(pp, dp, embedding, cp, None if cp is None else _own_group(ranks.T.tolist()))


def axis_size(mesh: DeviceMesh | None, name: str) -> int:
    """Ranks along an axis; 1 where the mesh has none of that name."""
    return mesh[name].size() if mesh is not None and name in (mesh.mesh_dim_names or ()) else 1


def _own_group(groups: list[list[int]]) -> ProcessGroup | None:
    """The one of several new groups that this rank is in; every rank makes all of them."""
    made = [dist.new_group(ranks) for ranks in groups]
    own = [group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks]
    return cast("ProcessGroup", own[0]) if own else None


def world_size() -> int:
    """Processes that work together; 1 where no process group was made."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_world_size(config: TransformerConfig, size: int) -> None:
    """Refuse a number of processes the model cannot be laid over.

    Raises:
        ValueError: it is no multiple of what one replica takes.
    """
    n = config.model_parallel_size
    if size % n:
        raise ValueError(
            f"{model_parallel_words(config)}: expected a divisor of the {size} processes there are, got {n}; start a "
            f"multiple of {n} (diptych train --nproc {n}, or torchrun --nproc-per-node {n})"
        )


def sum_over(value: torch.Tensor, group: ProcessGroup | None, what: str, timeout: float) -> torch.Tensor:
    """The sum of every rank's value, on every rank; the value itself without a group.

    Args:
        value: this rank's.
        group: the ranks.
        what: it is, for the error.
        timeout: seconds to wait for the others.

    Raises:
        PipelineError: some rank did not come in time.
    """
    if group is None:
        return value
    value = value.clone()
    wait_for(dist.all_reduce(value, group=group, async_op=True), what, timeout)
    return value


def wait_for(work: dist.Work | None, what: str, timeout: float) -> None:
    """Wait for a sum as long as for a message: a rank that met a fault does not come."""
    assert work is not None, "this rank is in its own groups"
    try:
        work.wait(datetime.timedelta(seconds=timeout))
    except RuntimeError as error:
        raise PipelineError(
            f"rank {dist.get_rank()}: expected {what} within pipeline_timeout={timeout:g} s, and it did not come "
            f"({str(error).splitlines()[0]}); look at what the other ranks say, or raise pipeline_timeout "
            "(of a cp_context of one's own, its field timeout)"
        ) from None


def gather(mapping: dict[str, Any], group: ProcessGroup | None) -> dict[str, Any]:
    """The entries of every rank's dictionary, on every rank; where two ranks have one name, the first's stays."""
    if group is None:
        return mapping
    parts: list[Any] = [None] * group.size()
    with _named("the arrays of all pipeline ranks"):
        dist.all_gather_object(parts, mapping, group=group)
    return {name: value for part in reversed(parts) for name, value in part.items()}


def said_on_all_ranks(text: str, groups: ProcessGroups) -> list[str]:
    """What every process says, in order of their ranks, on every process."""
    if groups == ProcessGroups():
        return [text]
    said: list[Any] = [None] * world_size()
    with _named("what every rank has found"):
        dist.all_gather_object(said, text)
    return said


def on_first_rank(write: Callable[[], Result], groups: ProcessGroups) -> Result:
    """Call a function on the first process alone; every process gets what it returned, or raises what it raised."""
    if groups == ProcessGroups():
        return write()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = write()
        except Exception as error:  # whatever it is: the other processes must not wait for a call that failed
            outcome[1] = error
    with _named("to be told by rank 0 what came of writing"):
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say what was expected where another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(
            f"rank {dist.get_rank()}: expected {what}, and it did not come ({str(error).splitlines()[0]}); look at "
            "what the other ranks say"
        ) from None
