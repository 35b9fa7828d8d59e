"""The processes of a training run, which torchrun or parity.cli.processes has started.

A process reads its rank and the address of the others from torchrun's environment variables: RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

import datetime
import math
import os
import time

from diptych.plans.mesh import replica_settings
from diptych.plans.schedule.messages import PipelineError
from diptych.plans.training import check_trainable
from parity.cli.commands import Compare, Train, TrainingRun
from parity.cli.processes import CHILD, end_with_parent, report_joined

REPORT_SECONDS = 10.0
"""Seconds that the first process has to print an error common to all processes before another process prints it."""
LONGEST_SILENCE = 100.0
"""Seconds after which a process of jax.distributed counts as dead, unless pipeline_timeout is shorter."""


def is_one_of_several() -> bool:
    """Return True if this process is one of several processes of a run."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """Return the global rank of this process."""
    return int(os.environ["RANK"]) if is_one_of_several() else 0


def reports_errors() -> bool:
    """Return True if this process prints an error common to all processes.

    One process per machine prints it. Torchrun and start_processes end all processes when that process has ended. The
    others wait in this function until it has printed; a process that still runs afterwards has an error of its own.
    """
    if not is_one_of_several() or int(os.environ.get("LOCAL_RANK", "0")) == 0:
        return True
    time.sleep(REPORT_SECONDS / 2 if CHILD in os.environ else REPORT_SECONDS)  # within the launcher's GRACE
    return True


def check_processes(command: Train) -> None:
    """Check that the number of processes and the batch fit the model, before any process is started.

    Raises:
        ValueError: the number of processes or the batch does not fit; the message names the setting.
    """
    n = command.model.model_parallel_size
    what = "processes"
    size = command.ranks_here
    remedy = f"give --nproc {n}, or start a multiple of {n} by torchrun"
    if command.backend == "jax":
        if is_one_of_several():
            raise ValueError(
                "backend: expected 'torch' under torchrun, got 'jax'; start each of its processes by itself, with "
                "--coordinator-address"
            )
        if command.coordinator_address == "auto":
            return  # the number of processes is known after joining
        size *= command.num_processes or 1
        what = "devices"
        remedy = f"give an --nproc that makes it a multiple of {n}"
    elif is_one_of_several():
        size = int(os.environ["WORLD_SIZE"])
    _count_replicas(command, size, what, remedy)


def count_replicas(command: Compare) -> int:
    """Return the number of replicas of a comparison, after a check that ranks and the batch fit the model.

    Raises:
        ValueError: the number of ranks or the batch does not fit; the message names the setting.
    """
    n = command.model.model_parallel_size
    return _count_replicas(command, command.ranks_here, "ranks", f"give --nproc {n}, or a multiple of it")


def _count_replicas(command: TrainingRun, size: int, what: str, remedy: str) -> int:
    n = command.model.model_parallel_size
    if size % n:
        raise ValueError(
            f"nproc: expected a multiple of {replica_settings(command.model)}={n} {what}, got {size}; {remedy}"
        )
    check_trainable(command.model, command.train, size // n)
    return size // n


def join_processes(device_type: str, timeout: float):
    """Join the process group of all processes.

    Args:
        device_type: ``cpu`` or ``cuda``.
        timeout: seconds within which all processes must join; also the time-out of collectives without another one.

    Returns:
        The device of this process.

    Raises:
        PipelineError: a process did not join in time.
    """
    import torch
    import torch.distributed as dist

    end_with_parent()
    limit = datetime.timedelta(seconds=timeout)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        if device_type == "cuda":
            dist.init_process_group("nccl", timeout=limit, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=limit)
    except RuntimeError as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PipelineError(
            f"rank {rank()}: expected all {os.environ.get('WORLD_SIZE')} ranks to meet at {place} within "
            f"join_timeout={timeout:g} s, but they did not ({cause}); see the output of the other ranks, start all of "
            "them, or raise join_timeout"
        ) from None
    report_joined()
    return device


def join_devices(command: Train):
    """Join JAX's processes and return the mesh of the run's devices.

    It must be called before any use of JAX.

    Returns:
        The mesh, or None for a single device.

    Raises:
        ValueError: there are fewer devices than requested, or they do not fit the model.
        RuntimeError: the other processes did not join.
    """
    import jax

    from jax_impl.groups import make_mesh

    if command.coordinator_address is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            None if command.coordinator_address == "auto" else command.coordinator_address,
            command.num_processes,
            command.process_id,
            initialization_timeout=math.ceil(command.join_timeout),
            heartbeat_timeout_seconds=math.ceil(min(command.model.pipeline_timeout, LONGEST_SILENCE)),
        )
        return make_mesh(command.model)
    check_devices(command.ranks_here)
    return make_mesh(command.model, jax.devices()[: command.ranks_here])


def check_devices(wanted: int) -> None:
    """Check that JAX has a device for each rank.

    Raises:
        ValueError: it has fewer.
    """
    import jax

    devices = jax.devices()
    if len(devices) < wanted:
        raise ValueError(f"nproc: expected at most the {len(devices)} devices of JAX, got {wanted}; lower --nproc")
