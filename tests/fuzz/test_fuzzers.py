"""A hundred programs of every fuzzer: equal to the plain program, or refused by an error of this project."""

import ctypes
import gc
import mmap

import jax
import pytest

from tests.fuzz.harness import EQUAL, TECHNIQUES, Growth, GrowthWatch, Wrong, load, run_programs

PROGRAMS = 100
COMPILED = {"modules_jax", "pipelines_jax"}
"""Fuzzers whose programs XLA compiles. They run in make test-all."""


def forget_compiled(technique: str) -> None:
    """Drop compiled programs, of which JAX keeps all: 1.7 GiB of 50 programs, none of which is a leak."""
    if technique in COMPILED:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "technique", [pytest.param(name, marks=pytest.mark.slow) if name in COMPILED else name for name in TECHNIQUES]
)
def test_a_hundred_programs(technique, unchecked_shapes):
    """Without the checks of annotations, as users run them: in traces of models these take nine tenths of the time."""
    run_programs(technique, range(5))  # warms up what is created on first use
    forget_compiled(technique)
    before = Growth()
    counts = run_programs(technique, range(5, PROGRAMS))
    forget_compiled(technique)
    before.check(mebibytes=256.0 if technique in COMPILED else 64.0)
    assert counts[EQUAL] >= PROGRAMS // 5, counts  # a fuzzer that is always refused tests nothing
    missing = {case for case in load(technique).HARD_CASES if not counts[f"uses {case}"]}
    assert not missing, (missing, counts)


@pytest.mark.parametrize("leaks", [True, False])
def test_a_leak_is_seen_in_a_long_run(leaks):
    """Two mebibytes from every program, or from those of the first window.

    They are mapped, because an allocation may reuse memory that earlier tests of this process have freed.
    """
    leaked = []
    watch = GrowthWatch(programs=8, mebibytes=4.0, filling=2)

    def run(programs: int) -> None:
        for program in range(programs):
            if leaks or program < 24:
                leaked.append(mmap.mmap(-1, 2 * 2**20))
                leaked[-1].write(b"x" * 2 * 2**20)
            watch.check()

    if leaks:
        with pytest.raises(Wrong, match=r"resident memory grew in every 8 programs, MiB: \d+, \d+, \d+, \d+"):
            run(40)
    else:
        run(64)
