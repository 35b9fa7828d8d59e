"""The processes of a training run: this one, those that torchrun started, or those that parity.cli.processes starts
here.

A process that is one of several knows it from its environment, which is torchrun's: RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT.
"""

import datetime
import math
import os
import time

from diptych.plans.mesh import model_parallel_words
from diptych.plans.schedule.messages import PipelineError
from diptych.plans.training import check_trainable
from parity.cli.commands import Train
from parity.cli.processes import CHILD, end_with_parent, report_joined

SPEAKING = 10.0
"""Seconds one process has to say what all would say alike, before another says it."""
LONGEST_SILENCE = 100.0
"""Seconds after which a process of jax.distributed counts as dead, unless pipeline_timeout is shorter."""


def is_one_of_several() -> bool:
    """Whether this process was started as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """Global rank of this process."""
    return int(os.environ["RANK"]) if is_one_of_several() else 0


def speaks() -> bool:
    """Whether this process says what all would say alike: one on every machine, since each sees its own files.

    Torchrun and start_processes end all processes when that one has ended, so the others stay until it has spoken; who
    is not ended by then has something of its own to say.
    """
    if not is_one_of_several() or int(os.environ.get("LOCAL_RANK", "0")) == 0:
        return True
    time.sleep(SPEAKING / 2 if CHILD in os.environ else SPEAKING)  # within the launcher's GRACE
    return True


def check_processes(command: Train) -> None:
    """Refuse a number of processes, or a batch, that the model cannot have; before any process is started.

    Raises:
        ValueError: naming the setting.
    """
    n, what = command.model.model_parallel_size, "processes"
    size, remedy = command.ranks_here, f"give --nproc {n}, or start a multiple of {n} by torchrun"
    if command.backend == "jax":
        if is_one_of_several():
            raise ValueError(
                "backend: expected 'torch' under torchrun, got 'jax'; start each of its processes by itself, with "
                "--coordinator-address"
            )
        if command.coordinator_address == "auto":
            return  # how many there are is known once they have met
        size, what = size * (command.num_processes or 1), "devices"
        remedy = f"give an --nproc that makes it a multiple of {n}"
    elif is_one_of_several():
        size = int(os.environ["WORLD_SIZE"])
    if size % n:
        raise ValueError(
            f"nproc: expected a multiple of {model_parallel_words(command.model)}={n} {what}, got {size}; {remedy}"
        )
    check_trainable(command.model, command.train, size // n)


def join_processes(device_type: str, timeout: float):
    """Make the process group of all processes.

    Args:
        device_type: ``cpu`` or ``cuda``.
        timeout: seconds in which all have to come; also of every collective that has no other bound.

    Returns:
        The device this process computes on.

    Raises:
        PipelineError: not all came in time.
    """
    import torch
    import torch.distributed as dist

    end_with_parent()
    limit, device = datetime.timedelta(seconds=timeout), torch.device("cpu")
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
            f"join_timeout={timeout:g} s, and they did not ({cause}); look at what the other ranks say, start all of "
            "them, or raise join_timeout"
        ) from None
    report_joined()
    return device


def join_devices(command: Train):
    """JAX's devices for a run, of all its processes, which jax.distributed joins; called before JAX is used.

    Returns:
        Their mesh, or None where there is one device.

    Raises:
        ValueError: there are fewer devices than asked for, or they do not fit the model.
        RuntimeError: the other processes did not come.
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
    devices, wanted = jax.devices(), command.ranks_here
    if len(devices) < wanted:
        raise ValueError(f"nproc: expected at most the {len(devices)} devices JAX has, got {wanted}")
    return make_mesh(command.model, devices[:wanted])
