"""The processes of a training run: this one, those that torchrun started, or those started here.

A process that is one of several knows it from its environment, which is torchrun's: RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from types import FrameType

from parity.commands import Train
from plans.partition import model_parallel_words
from plans.training import check_trainable

GRACE = 10.0
"""Seconds the other processes get to end by themselves after one has failed."""
SPEAKING = 10.0
"""Seconds one process has to say what all would say alike, before another says it."""
LONGEST_SILENCE = 100.0
"""Seconds after which a process of jax.distributed counts as dead, unless pipeline_timeout is shorter."""
CHILD = "DIPTYCH_CHILD"
"""Set where start_processes started this process, whose standard input then ends with its parent."""


def is_one_of_several() -> bool:
    """Whether this process was started as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """Global rank of this process."""
    return int(os.environ["RANK"]) if is_one_of_several() else 0


def speaks() -> bool:
    """Whether this process says what all would say alike: one on every machine, since each sees its own files.

    Torchrun ends all processes when one has ended, so the others stay until it has spoken; who is not ended by then has
    something of its own to say. Processes of start_processes have their time, and need not.
    """
    if not is_one_of_several() or int(os.environ.get("LOCAL_RANK", "0")) == 0:
        return True
    if CHILD in os.environ:
        return False
    time.sleep(SPEAKING)
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


def start_processes(count: int, module: str, arguments: Sequence[str]) -> int:
    """Run a module in several processes on this machine, and wait for all of them.

    Signals go on to every process. When one fails, the others get a moment to say what they missed, and are ended. When
    this process dies, however it does, they end too.

    Returns:
        The exit code of the first to fail, or 0.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Of torchrun, where it started this process alone: ranks would look for the store it keeps for its own.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), CHILD: "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**outside, **shared, "RANK": str(number), "LOCAL_RANK": str(number)},
            stdin=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C comes here, and goes on once
        )
        for number in range(count)
    ]
    with _forwarded(processes):
        try:
            return _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
                if process.stdin is not None:
                    process.stdin.close()


def _wait(processes: list[subprocess.Popen]) -> int:
    """Until all have ended, or one has failed and the others had their time."""
    failed, end = 0, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.05)
        codes = [process.returncode for process in processes if process.returncode]
        if codes and not failed:
            failed, end = codes[0], time.monotonic() + GRACE
    codes = [process.poll() for process in processes]
    for number, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"diptych: rank {number} was ended by {signal.Signals(-code).name}", file=sys.stderr)
            failed = failed if failed > 0 else 1
        elif code is None:
            print(f"diptych: rank {number} did not end by itself, and was stopped", file=sys.stderr)
    return failed or max((code for code in codes if code), default=0)


@contextmanager
def _forwarded(processes: list[subprocess.Popen]):
    """SIGINT and SIGTERM go to every process instead of ending this one."""

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Where start_processes started this process: end it when the parent is gone."""

    def watch() -> None:
        # Not sys.stdin, whose lock this thread would hold for good: an interpreter that ends by an error aborts on it.
        while os.read(0, 1024):
            pass
        os._exit(1)

    if os.environ.get(CHILD):
        threading.Thread(target=watch, daemon=True).start()


def join_processes(device_type: str):
    """Make the process group of all processes, and their mesh's device.

    Returns:
        The device this process computes on.
    """
    import torch
    import torch.distributed as dist

    end_with_parent()
    if device_type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


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
            initialization_timeout=math.ceil(command.model.pipeline_timeout),
            heartbeat_timeout_seconds=math.ceil(min(command.model.pipeline_timeout, LONGEST_SILENCE)),
        )
        return make_mesh(command.model)
    devices, wanted = jax.devices(), command.ranks_here
    if len(devices) < wanted:
        raise ValueError(f"nproc: expected at most the {len(devices)} devices JAX has, got {wanted}")
    return make_mesh(command.model, devices[:wanted])
