"""Test that the commands and programs of the README, and the examples it links to, run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parity.cli.main import main
from parity.compare import relative_difference

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [(ROOT / "docs" / name).read_text() for name in ("using.md", "recompute.md")]
EXAMPLES = [example for page in PAGES for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
COMMANDS = re.findall(r"^    diptych ([^#\n]*?) *(?:#.*)?$", README, re.MULTILINE)


CONNECTIONS = [example for example in EXAMPLES if "HyperConnectionModule" in example]
RECIPES = [example for example in EXAMPLES if "load_model" in example]


def run_script(script: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr


def test_there_is_an_example_a_backend_and_each_is_short():
    assert len(EXAMPLES) == 5
    for kind in (CONNECTIONS, RECIPES):
        for package, example in zip(("reference_torch", "jax_impl"), kind, strict=True):
            assert package in example
            assert sum(bool(line) and "import" not in line for line in example.splitlines()) <= 10


@pytest.mark.multiprocess
@pytest.mark.parametrize("example", CONNECTIONS, ids=["torch", "jax"])
def test_example_runs_in_a_fresh_process(example):
    run_script(example + "\nassert output.shape == (2, 16, 64)\n", ROOT)


@pytest.mark.multiprocess
def test_three_lines_run_one_kernel_from_both_frameworks():
    page = (ROOT / "docs/kernels.md").read_text()
    (script,) = re.findall(r"^    python -c '\n(.*?)' *# 0\.0$", page, re.MULTILINE | re.DOTALL)
    assert script.count("\n") == 2
    command = [sys.executable, "-W", "error", "-c", script.replace("\n    ", "\n").strip()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.stdout == "0.0\n", done.stderr


@pytest.mark.multiprocess
def test_the_recompute_example_drops_and_replays():
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (example,) = [example for example in examples if "CheckpointWithoutOutput" in example]
    discard = "checkpoint.discard_output_and_register_recompute(output)"
    assert discard in example
    dropped = f"{discard}\nwith pytest.raises(DiscardedActivationError): hidden.sum()"
    before = "import pytest\nfrom reference_torch.recompute import DiscardedActivationError\n"
    run_script(f"{before}{example.replace(discard, dropped)}\nassert weight.grad.abs().sum() > 0\n", ROOT)


@pytest.mark.multiprocess
def test_recompute_example_measures_what_its_comment_says():
    (example,) = [example for example in EXAMPLES if "CheckpointWithoutOutput" in example]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
    )
    first, second = re.findall(r"(\d+\.\d) MiB", done.stdout)
    assert f"# {first}, then {second}" in example


@pytest.mark.slow
@pytest.mark.multiprocess
def test_recipes_load_and_train_the_same_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 200)
    small = "--train-iters 2 --seq-length 24 --global-batch-size 2 --hidden-size 16 --eval-iters 1"
    assert main(["train", *small.split(), "--data-path", "text.txt", "--save", "runs/using"]) == 0
    ending = "\nimport numpy\nnumpy.save('{}.npy', numpy.asarray({}))\n"
    run_script(RECIPES[0] + ending.format("torch", "output.detach()"), tmp_path)
    run_script(RECIPES[1] + ending.format("jax", "output"), tmp_path)
    ours, theirs = np.load("torch.npy"), np.load("jax.npy")
    assert ours.shape == (1, 20, 256)
    assert relative_difference(ours, theirs) < 1e-5


@pytest.mark.slow
def test_commands_run_in_order_when_made_small(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_text").mkdir()
    (tmp_path / "my_text" / "text.txt").write_text("the quick brown fox\n" * 200)
    small = "--train-iters 2 --lr-warmup-iters 1 --seq-length 8 --global-batch-size 2 --hidden-size 16 --eval-iters 1"
    assert len(COMMANDS) >= 8
    for command in COMMANDS:
        words = shlex.split(command)
        if is_run_of_ranks(words):
            continue
        if "--help" in words:
            with pytest.raises(SystemExit) as stop:
                main(words)
            assert stop.value.code == 0
        else:
            words += small.split() if words[0] in ("compare", "train") else []
            assert main(words) == 0, (command, capsys.readouterr().err)
    assert (tmp_path / "runs" / "cross" / "curves.png").exists()


def is_run_of_ranks(words: list[str]) -> bool:
    """Whether a command needs processes or devices of its own."""
    return words[0] == "train" and any("parallel-size" in word for word in words)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_commands_of_ranks_run_when_made_small(tmp_path):
    small = "--train-iters 2 --lr-warmup-iters 1 --seq-length 8 --global-batch-size 4 --hidden-size 16 --eval-iters 1"
    commands = [words for command in COMMANDS if is_run_of_ranks(words := shlex.split(command))]
    losses = []
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "parity.cli", *words, *small.split()],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        losses.append(float(re.findall(r"validation loss: (\S+)", done.stdout)[0]))
    assert len(losses) == 4
    for first, second in (losses[:2], losses[2:]):
        assert abs(first - second) < 1e-4


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_make_targets_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pairs = re.findall(r"^    make ([a-z-]+)|`make ([a-z-]+)", README, re.MULTILINE)
    named = {name for pair in pairs for name in pair if name}
    assert {"demo", "test"} <= named <= targets
    assert {"test-all", "check", "bench", "clean"} <= targets
