"""What the tests of rank pools run on ranks."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from reference_torch.rank_pool import RankPool


def rank_number() -> int:
    return dist.get_rank()


def double(x: torch.Tensor) -> torch.Tensor:
    """Write twice the argument into it."""
    return x.mul_(2)


def has_loaded(module: str) -> bool:
    return module in sys.modules


def environment(name: str) -> str | None:
    """Return an environment variable, as this process and those that it starts see it."""
    return os.environ.get(name)


class Squares(torch.utils.data.Dataset):
    """A data set of square numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index * index


def load_in_a_process() -> list[int]:
    """Return samples that a process loads."""
    return [int(batch) for batch in torch.utils.data.DataLoader(Squares(), batch_size=None, num_workers=1)]


def die_beside_a_sleeper(path: str) -> None:
    """The second rank leaves a process that inherits its pipes, whose id it writes to a file."""
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        with open(path, "w") as file:
            file.write(str(child))
        os._exit(7)


class Held:
    """What a rank may keep between two calls."""

    def __init__(self, start: int) -> None:
        self.value = start + dist.get_rank()

    def add(self, number: int) -> int:
        self.value += number
        return self.value


class Unreadable:
    """An answer that can be sent, but not taken."""

    def __reduce__(self) -> tuple:
        return int, ("unreadable",)


def misbehave(how: str, rank: int) -> int:
    """What a rank may do besides answering."""
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("of rank 1")
        if how == "exit":
            os._exit(7)
        if how == "hang":
            time.sleep(60)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "unpicklable":
            return lambda: None  # type: ignore[return-value]
        if how == "unreadable":
            return Unreadable()  # type: ignore[return-value]
    return dist.get_rank()


def keep_a_pool(path: str) -> None:
    """In a process of its own: a pool whose ranks are busy; writes their process ids into a file."""
    pool = RankPool(2)
    pool.run("tests.rank_pool_jobs:rank_number")
    with open(path + ".part", "w") as file:
        file.write(" ".join(map(str, pool.process_ids())))
    os.rename(path + ".part", path)
    pool.run("tests.rank_pool_jobs:misbehave", "hang", 0)
