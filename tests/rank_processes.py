"""Processes of ranks that have ended, and the end of their process groups."""

import contextlib
import os
import time

import torch


def gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not all(map(gone, pids)):
        assert time.monotonic() < end, f"still there: {[pid for pid in pids if not gone(pid)]}"
        time.sleep(0.02)


def end_groups() -> None:
    """Destroy all process groups but that of all ranks, each of which has a thread that polls."""
    for group in {*torch.distributed.distributed_c10d._world.pg_map} - {torch.distributed.group.WORLD}:
        torch.distributed.destroy_process_group(group)
