"""The JAX executor of pipelines: those of the folder jax_cases, in a process that has a device for every rank."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jax_process import run_cases

ROOT = Path(__file__).parents[2]
CASES = [
    f"tests/pipeline/jax_cases/{name}.py"
    for name in ("gradients", "programs", "memory", "mistakes", "modules", "others", "user_modules")
]


@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_pipelines_of_several_devices():
    run_cases("not slow", 880, *CASES)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(2700)
def test_more_pipelines_of_several_devices():
    run_cases("slow", 2680, *CASES)


JOIN = """
import sys
import jax

jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
"""

STEPS = """
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_impl.pipeline import make_pipeline_step
from jax_impl.transformer import GPTModel
from diptych.plans.config import TransformerConfig

whole = TransformerConfig(
    hidden_size=16, num_layers=2, num_attention_heads=2, vocab_size=11, seq_length=8, params_dtype="float64",
    init_method_std=0.3,
)
model = GPTModel(whole)
graph, params = nnx.split(model, nnx.Param)
step = make_pipeline_step(model, replace(whole, pipeline_model_parallel_size=2), transform=sys.argv[3])
tokens, targets = np.random.default_rng(0).integers(0, 11, (2, 2, 2, 8)).astype(np.int32)
staged = step.stage_parameters(params)
loss, gradients = step(staged, tokens, targets)
updated = jax.jit(lambda p, g: jax.tree.map(lambda a, b: a - 0.1 * b, p, g))(staged, gradients)
step(updated, tokens, targets)


def unsharded(params):
    return sum(nnx.merge(graph, params)(*map(jnp.asarray, part)) for part in zip(tokens, targets)) / 2


expected, theirs = jax.jit(jax.value_and_grad(unsharded))(params)
np.testing.assert_allclose(loss, expected, rtol=1e-13)
for a, b in zip(jax.tree.leaves(step.join_parameters(gradients)), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)
print("equal")
"""

TRAINS = """
from dataclasses import replace
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from jax_impl.train import Trainer
from diptych.plans.checkpoint import CheckpointError
from diptych.plans.config import TrainConfig, TransformerConfig
from tests.backends import tiny_corpus

whole = TransformerConfig(hidden_size=16, num_layers=2, num_attention_heads=2, seq_length=8, params_dtype="float64")
train = TrainConfig(train_iters=8, global_batch_size=4, micro_batch_size=1, eval_iters=2)
folder, corpus, mesh, p = Path(sys.argv[3]), tiny_corpus(), None, 2
if sys.argv[4] == "replicas":
    mesh, p = Mesh(np.array(jax.devices()).reshape(2, 1), ("dp", "pp")), 1
elif sys.argv[4] == "one replica":
    mesh = Mesh(np.array(jax.devices()).reshape(1, 2), ("dp", "pp"))
trainer = Trainer(replace(whole, pipeline_model_parallel_size=p), train, corpus, mesh)
alone = Trainer(whole, train, corpus)


def check(*steps):
    for step in steps:
        found, expected = trainer.train_step(step), alone.train_step(step)
        np.testing.assert_allclose((found.loss, found.grad_norm), (expected.loss, expected.grad_norm), rtol=1e-10)
    np.testing.assert_allclose(trainer.validation_loss(), alone.validation_loss(), rtol=1e-10)
    theirs = alone.parameters()
    for name, value in trainer.parameters().items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-8, atol=1e-12, err_msg=name)


check(0, 1)
for _ in range(5):  # files of one name: two processes that write at once would take them from each other
    path = trainer.save(folder / "run")
check(2)
assert trainer.resume(folder / "run") == 2 and path == folder / "run" / "step_00000002.safetensors"
assert alone.resume(folder / "run") == 2
check(2, 3)
trainer.save(folder / "run")


def refused(method, path):
    try:
        method(path)
    except CheckpointError as error:
        return str(error)


message = refused(trainer.resume, (path, folder / "run")[jax.process_index()])
assert message.count("on rank 0: step 2, checksum ") == message.count("on rank 1: step 4, checksum ") == 1, message
(folder / "file").touch()
message = refused(trainer.save, folder / "file")
assert "expected to write" in message, message
assert trainer.any_process(trainer.is_main_process) and not trainer.any_process(False)
print("equal")
"""


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("transform", ["pmap", "shard_map"])
def test_ranks_may_lie_in_two_processes(transform):
    in_two_processes(JOIN + STEPS, transform)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("cut", ["ranks", "replicas", "one replica"])
def test_training_may_lie_in_two_processes(cut, tmp_path):
    in_two_processes(JOIN + TRAINS, str(tmp_path), cut)


def free_port() -> int:
    """Of this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def in_two_processes(script: str, *arguments: str) -> None:
    """Run a script in two processes with one device each, and see that both print that they found all equal."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, port, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
            assert "equal" in output
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # closes its pipes
