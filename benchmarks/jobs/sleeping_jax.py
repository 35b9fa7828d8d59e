"""JAX pipelines of sleeping stages on CPU devices of a separate process.

benchmarks/pipeline.py and benchmarks/generated_schedule.py use this module. As a program, it reads cases that
time_apart pickles from standard input, and prints their seconds as JSON.
"""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.schedule.actions import Action, Kind, Schedule
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.simulate import Costs


class Sleeping(NamedTuple):
    """A pipeline of sleeping stages."""

    config: TransformerConfig
    """Configuration with the schedule; the stages should compute much faster than they sleep."""
    num_microbatches: int
    costs: Costs
    """Seconds that the actions sleep."""
    slots: str = "canonical"
    """See jax_impl.pipeline.make_pipeline_step."""


def time_apart(cases: Sequence[Sleeping], steps: int) -> list[list[float]]:
    """Return the seconds of several steps of each case in a separate process, without the compilation."""
    ranks = max(case.config.pipeline_model_parallel_size for case in cases)
    # A sleeping rank occupies a thread of XLA.
    environment = os.environ | {"NPROC": str(4 * ranks), "JAX_NUM_CPU_DEVICES": str(ranks), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.jobs.sleeping_jax"],
        input=pickle.dumps((cases, steps)),
        stdout=subprocess.PIPE,
        env=environment,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


def time_sleeping(case: Sleeping, steps: int) -> list[float]:
    """Return the seconds of several steps on devices of this process, without the compilation."""
    import jax
    from flax import nnx

    from jax_impl.pipeline import make_pipeline_step
    from jax_impl.transformer import GPTModel

    config = case.config
    m = case.num_microbatches
    model = GPTModel(unsharded(config))
    step = make_pipeline_step(model, config, slots=case.slots)
    staged = step.stage_parameters(nnx.split(model, nnx.Param)[1])
    tokens = np.zeros((m, 1, config.seq_length), np.int32)
    seconds = []
    with _stages_sleep(schedule_for(config, m), case.costs):
        for _ in range(steps + 1):
            start = time.perf_counter()
            jax.block_until_ready(step(staged, tokens, tokens))
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


@contextmanager
def _stages_sleep(schedule: Schedule, costs: Costs) -> Iterator[None]:
    """Make programs traced in this context sleep in every F, B, I and W, before the rank sends its result."""
    import jax
    import jax.numpy as jnp
    from jax import Array

    from jax_impl.pipeline.executor import _Execution, _SlotResult

    def slept(x: Array, kind: Kind, stage: Array) -> Array:
        """Return x after a sleep."""
        times = [costs.time(Action(kind, number, 0)) for number in range(schedule.num_stages)]

        def sleep(seconds: np.ndarray, one: np.ndarray) -> np.ndarray:
            time.sleep(float(seconds))
            return np.zeros_like(one)

        one = x.reshape(-1)[0]
        return x + jax.pure_callback(sleep, jax.ShapeDtypeStruct((), x.dtype), jnp.asarray(times)[stage], one)

    plain = _Execution._forward, _Execution._backward, _Execution._weight_gradients

    def forward(execution: _Execution, state: Any, row: Any, result: _SlotResult) -> _SlotResult:
        result = plain[0](execution, state, row, result)
        return result._replace(output=slept(result.output, "F", row.forward_stage))

    def backward(execution: _Execution, state: Any, row: Any, result: _SlotResult) -> _SlotResult:
        result = plain[1](execution, state, row, result)
        kind: Kind = "I" if schedule.splits_backward else "B"  # after a full backward, W follows in the same slot
        return result._replace(input_gradient=slept(result.input_gradient, kind, row.backward_stage))

    def weight_gradients(execution: _Execution, row: Any, weights: Any, result: _SlotResult) -> _SlotResult:
        result = plain[2](execution, row, weights, result)
        return result._replace(output=slept(result.output, "W", row.weights_stage))

    with patch.multiple(_Execution, _forward=forward, _backward=backward, _weight_gradients=weight_gradients):
        yield


if __name__ == "__main__":
    given, count = pickle.loads(sys.stdin.buffer.read())
    print(json.dumps([time_sleeping(case, count) for case in given]))
