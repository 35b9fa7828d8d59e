"""Compile every candidate block of every kernel at production sizes, in parallel, before they are measured.

    python -m benchmarks.compile_blocks          (make bench-gpu calls it; needs one GPU)
    python -m benchmarks.compile_blocks --processes 8

Compiling takes nearly all the time of a first measurement and uses one core. Compiled kernels go to Triton's cache,
where the benchmarks find them. A kernel runs once, because Triton compiles for the alignment of real arrays.
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from rich.progress import track

from benchmarks.delta_rule_kernels import tables_in
from benchmarks.kernels import random_inputs
from diptych_kernels import aot as ahead
from diptych_kernels import torch_backend as torch_ops
from diptych_kernels import tuning
from diptych_kernels.launch_configs import Block

Job = tuple[str, str, Block]
"""Group of a kernel, its name in the group, and a block."""


def main() -> None:
    """Compile, and print the blocks that this GPU cannot run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1), help="each takes up to 3 GiB")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.compile_blocks: expected a CUDA device, got none")
    pending = [*jobs(recorded_launches())]
    context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked process
    with context.Pool(given.processes) as pool:
        done = pool.imap_unordered(compile_block, pending)
        failures = [failure for failure in track(done, "blocks", total=len(pending)) if failure]
    print(f"{len(pending)} blocks compiled, {len(failures)} of them cannot run here")
    for failure in failures:
        print(failure)


@cache
def recorded_launches() -> dict[str, dict[str, ahead.Recorded]]:
    """Return the launches that the benchmarks measure, by group and name."""
    delta_rule = ahead.delta_rule_production(tokens=8192, heads=32, key=128, value=128)
    return {"streams": ahead.production(), "delta rule": delta_rule}


def jobs(launches: dict[str, dict[str, ahead.Recorded]]) -> Iterator[Job]:
    """Yield every block of every kernel."""
    for group, named in launches.items():
        for name, recorded in named.items():
            for block in tuning.candidates_of(recorded.build):
                yield group, name, block


def compile_block(job: Job) -> str:
    """Run a kernel once at a block, and return the error, or the empty string."""
    group, name, block = job
    recorded = recorded_launches()[group][name]
    inputs: Any = random_inputs(recorded, "cuda")
    if group == "delta rule":
        inputs = tables_in(inputs, recorded)
    try:
        torch_ops.run(recorded.build(block, **recorded.sizes), inputs)
        torch.cuda.synchronize()
    except Exception as error:  # of any type: a block may need more shared memory than the GPU has
        return f"{name} {tuple(block)}: {type(error).__name__}: {error}".splitlines()[0][:150]
    finally:
        del inputs
        torch.cuda.empty_cache()
    return ""


if __name__ == "__main__":
    main()
