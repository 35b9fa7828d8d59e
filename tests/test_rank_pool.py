"""A pool of ranks: what they answer, how they end, and what they may do."""

import contextlib
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reference_torch import rank_pool
from reference_torch.rank_pool import RankError, RankPool
from tests.fuzz.harness import Growth
from tests.rank_processes import gone, wait_until_gone

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
JOBS = "tests.rank_pool_jobs"


def test_ranks_answer_in_order_and_stay():
    with RankPool(3) as pool:
        assert pool.run(f"{JOBS}:rank_number") == [0, 1, 2]
        pids = pool.process_ids()
        assert pool.run(f"{JOBS}:misbehave", "nothing", 0) == [0, 1, 2]
        assert pool.process_ids() == pids
        assert not any(map(gone, pids))
    wait_until_gone(pids)


def test_ranks_keep_what_they_are_given_to_hold():
    with RankPool(2) as pool:
        assert pool.hold(f"{JOBS}:Held", 10) is None
        assert pool.call("add", 5) == [15, 16]
        assert pool.run(f"{JOBS}:rank_number") == [0, 1]
        assert pool.call("add", 5) == [20, 21]
        with pytest.raises(RankError, match=r"has no attribute 'subtract'"):
            pool.call("subtract", 5)


MISBEHAVIOUR = {
    "raise": r"rank 1: ValueError: of rank 1\nTraceback",
    "exit": r"rank 1: died with exit code 7; what it wrote to standard error may tell why$",
    "kill": r"rank 1: died with exit code -9 \(Killed, for example because memory ran out\)$",
    "hang": r"^rank 1: no answer in 1 s; give a longer timeout if it was still at work$",
    "unpicklable": r"rank 1: .*[Pp]ickle",
}


def test_what_a_rank_does_instead_of_answering_reaches_the_caller():
    """Each time all ranks are gone, and the next call has new ones."""
    with RankPool(2) as pool:
        for how, message in MISBEHAVIOUR.items():
            assert pool.run(f"{JOBS}:rank_number") == [0, 1]
            pids = pool.process_ids()
            with pytest.raises(RankError, match=message):
                pool.run(f"{JOBS}:misbehave", how, 1, timeout=1.0 if how == "hang" else None)
            wait_until_gone(pids)
        with pytest.raises(RankError, match="has no attribute 'nowhere'"):
            pool.run(f"{JOBS}:nowhere")


def test_ranks_and_caller_have_their_own_tensors():
    x = torch.ones(3)
    with RankPool(2) as pool:
        assert [y.tolist() for y in pool.run(f"{JOBS}:double", x)] == [[2.0] * 3] * 2
    assert x.tolist() == [1.0] * 3


class OnlyHere:
    """A class that this process finds under a name that no rank can import."""


def test_an_argument_that_a_rank_cannot_read_is_its_error(monkeypatch):
    """As one of a class that was defined in a notebook."""
    monkeypatch.setattr(OnlyHere, "__module__", "only_here")
    monkeypatch.setitem(sys.modules, "only_here", SimpleNamespace(OnlyHere=OnlyHere))
    with (
        RankPool(2) as pool,
        pytest.raises(RankError, match="rank 0: ModuleNotFoundError: No module named 'only_here'"),
    ):
        pool.run(f"{JOBS}:double", OnlyHere())


def test_an_answer_that_cannot_be_taken_leaves_none_behind():
    """Those of the other ranks would be taken for answers to the next call."""
    with RankPool(2) as pool:
        pool.hold(f"{JOBS}:Held", 10)
        pids = pool.process_ids()
        with pytest.raises(ValueError, match=r"invalid literal for int.*'unreadable'"):
            pool.run(f"{JOBS}:misbehave", "unreadable", 0)
        wait_until_gone(pids)
        pool.hold(f"{JOBS}:Held", 10)
        assert pool.call("add", 5) == [15, 16]


def test_a_rank_that_died_between_two_calls_is_named():
    with RankPool(2) as pool:
        pool.run(f"{JOBS}:rank_number")
        pids = pool.process_ids()
        os.kill(pids[1], signal.SIGKILL)
        wait_until_gone(pids[1:])
        with pytest.raises(RankError, match="rank 1: died with exit code -9"):
            pool.run(f"{JOBS}:rank_number")
        wait_until_gone(pids)
        assert pool.run(f"{JOBS}:rank_number") == [0, 1]


def test_a_stopped_rank_delays_nobody_beyond_the_timeout():
    """However large the argument that it does not take."""
    with RankPool(2) as pool:
        assert pool.run(f"{JOBS}:rank_number") == [0, 1]
        pids = pool.process_ids()
        os.kill(pids[1], signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(RankError, match="rank 1: no answer in 1 s"):
            pool.run(f"{JOBS}:double", torch.zeros(10_000_000), timeout=1.0)
        assert time.monotonic() - start < 10.0
        wait_until_gone(pids)


def test_threads_take_turns():
    with RankPool(2) as pool, ThreadPoolExecutor(4) as threads:
        found = [threads.submit(pool.run, f"{JOBS}:double", torch.full((2,), float(x))) for x in range(20)]
        assert [[y.tolist() for y in each.result()] for each in found] == [[[2.0 * x] * 2] * 2 for x in range(20)]


def test_ranks_can_start_processes():
    with RankPool(2) as pool:
        assert pool.run(f"{JOBS}:load_in_a_process") == [[0, 1, 4, 9]] * 2


def test_a_rank_that_dies_beside_processes_of_its_own_is_noticed():
    """They hold its pipes, and end with it."""
    with RankPool(2) as pool:
        pool.run(f"{JOBS}:rank_number")
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            with pytest.raises(RankError, match="rank 1: died with exit code 7"):
                pool.run(f"{JOBS}:die_beside_a_sleeper", f"{folder}/pid")
            assert time.monotonic() - start < 10.0
            wait_until_gone([int(Path(folder, "pid").read_text())])


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX has threads, which the child does not need
def test_a_fork_leaves_the_pool_to_its_parent():
    with RankPool(2) as pool:
        pool.run(f"{JOBS}:rank_number")
        child = os.fork()
        if child == 0:
            try:
                with contextlib.suppress(RuntimeError):
                    pool.run(f"{JOBS}:rank_number")
                    os._exit(3)
                pool.close()
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.run(f"{JOBS}:rank_number") == [0, 1]


def test_ranks_have_the_environment_of_their_parent(monkeypatch):
    """Not that in which the fork server started."""
    with RankPool(1) as pool:
        assert pool.run(f"{JOBS}:environment", "DIPTYCH_OF_A_TEST") == [None]
    monkeypatch.setenv("DIPTYCH_OF_A_TEST", "1")
    with RankPool(1) as pool:
        assert pool.run(f"{JOBS}:environment", "DIPTYCH_OF_A_TEST") == ["1"]


def test_a_module_that_cannot_be_loaded_is_refused():
    with pytest.raises(ModuleNotFoundError, match="preload: expected names of installed modules, got 'nowhere'"):
        rank_pool.preload("nowhere")


@pytest.mark.parametrize(("asked", "first"), [(["json"], ["json"]), (["__main__"], [])])
def test_what_others_let_the_fork_server_load_stays(monkeypatch, asked, first):
    server = multiprocessing.forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(server, "_preload_modules", asked)
    rank_pool._set_preloaded(multiprocessing.get_context("forkserver"))
    assert server._preload_modules == [*first, *rank_pool._preloaded]


def test_a_call_without_an_object_names_what_is_missing():
    """As after an error, which ends the ranks."""
    with RankPool(1) as pool, pytest.raises(Exception, match="expected the object that hold has made, got none"):
        pool.call("train_step", 0)


def test_ranks_begin_with_what_the_fork_server_has_loaded():
    """PyTorch's compiler, and what tests/conftest.py names; neither is imported by the job."""
    with RankPool(1) as pool:
        for module in ("torch._dynamo", "tests.everywhere.pipeline_jobs"):
            assert pool.run(f"{JOBS}:has_loaded", module) == [True], module
        assert pool.run(f"{JOBS}:has_loaded", "mailbox") == [False]


def test_pools_of_ranks_come_and_go():
    """Thirty of them: no process, thread or open file is left, and memory does not grow."""

    def use(pool: RankPool) -> None:
        assert pool.run(f"{JOBS}:rank_number") == [0, 1]
        pids.extend(pool.process_ids())

    pids: list[int] = []
    with RankPool(2) as pool:  # the fork server stays
        use(pool)
    before, files = Growth(), len(os.listdir("/proc/self/fd"))
    for number in range(30):
        pool = RankPool(2)
        try:
            use(pool)
            if number % 3 == 1:  # some are left by an error, some while a rank is stopped
                with pytest.raises(Exception, match="has no attribute 'nowhere'"):
                    pool.run(f"{JOBS}:nowhere")
            elif number % 3 == 2:
                os.kill(pool.process_ids()[1], signal.SIGSTOP)
        finally:
            pool.close()
    wait_until_gone(pids)
    before.check(threads=0, mebibytes=16.0)
    assert len(os.listdir("/proc/self/fd")) <= files
    assert len(pids) == 62
    assert len({*pids}) == 62
    assert threading.active_count() == before.threads


def test_ranks_end_with_the_process_that_made_them(tmp_path):
    """Killed, so that it cannot end them itself."""
    path = tmp_path / "pids"
    script = f"if __name__ == '__main__':\n    import tests.rank_pool_jobs as j\n    j.keep_a_pool({str(path)!r})\n"
    (tmp_path / "keeper.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    keeper = subprocess.Popen([sys.executable, str(tmp_path / "keeper.py")], env=environment)
    try:
        end = time.monotonic() + 60.0
        while not path.exists():
            assert keeper.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        pids = [int(pid) for pid in path.read_text().split()]
        assert len(pids) == 2
        assert not any(map(gone, pids))
    finally:
        keeper.kill()
        keeper.wait()
    wait_until_gone(pids)
