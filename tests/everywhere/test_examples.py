"""Examples of techniques in models of others: they are short, they run, and compute what they claim."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from reference_torch.rank_pool import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTS = {
    "pipeline_nnx": r"losses of the microbatches: \[0\.00",
    "pipeline_gpt2": r"losses of the microbatches: tensor\([34]\.",  # log(50257) = 10.8 at the beginning
    "context_parallel_qwen3_5": r"\[1, 64, 248320\] \[1, 64, 248320\]",
}


LONGER = {"locate_a_bug"}
"""Examples of a whole model in two frameworks; tests/parity/test_locate_command.py runs it."""


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 30 or name in LONGER


def test_an_example_compares_two_functions():
    done = run("examples/compare_your_function.py")
    assert "DIFFERENT: input gradient 'x'" in done.stdout


def test_an_example_is_a_test():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/test_your_pair.py")
    assert "1 passed" in done.stdout


def run(*words: str) -> subprocess.CompletedProcess:
    """Run an example as a user does."""
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=EXAMPLES.parent, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(name):
    pytest.importorskip("transformers")
    done = run(f"examples/{name}.py")
    assert re.search(PRINTS[name], done.stdout), done.stdout


@pytest.mark.multiprocess
def test_context_parallel_ranks_of_qwen_have_the_gradients_of_one_process():
    pytest.importorskip("transformers")
    from tests.everywhere.context_jobs import loss_and_gradients

    alone = loss_and_gradients(1)
    with RankPool(2) as pool:
        several = pool.run("tests.everywhere.context_jobs:loss_and_gradients", 2)[0]
    for one, other in zip(alone, several, strict=True):
        assert abs(one - other).max() <= 1e-4 * abs(one).max()
