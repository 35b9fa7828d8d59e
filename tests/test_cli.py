"""The diptych command: what it prints, writes and returns, and one line for every wrong input."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from parity.cli import launch
from parity.cli.flags import parse as _parse
from parity.cli.main import _check_output, _load_backend
from tests.command import diptych

ROOT = Path(__file__).parent.parent
SMALL = "--hidden-size 16 --num-layers 1 --num-attention-heads 2 --seq-length 8 --eval-iters 1 --global-batch-size 2"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


@pytest.mark.slow
def test_compare_prints_writes_and_succeeds(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    code = diptych(f"compare {SMALL} --train-iters 5 --log-interval 2 --data-path", corpus, "--output-dir", out)
    printed = capsys.readouterr().out
    assert code == 0, printed
    rows = [row for line in printed.splitlines() if len(row := line.split()) == 6 and row[0].isdigit()]
    assert [int(row[0]) for row in rows] == [0, 2, 4]
    assert all(abs(float(row[1]) - float(row[2])) < 1e-5 for row in rows)
    assert "equal within tolerance" in printed
    assert "threads: torch 1, XLA up to" in printed

    report = json.loads((out / "report.json").read_text())
    assert report["failures"] == []
    assert [step["step"] for step in report["steps"]] == list(range(5))
    assert report["model"]["hidden_size"] == 16
    assert {"torch", "jax"} <= report["environment"]["versions"].keys()
    relative = [gradient["relative"] for gradient in report["gradients"]]
    assert relative == sorted(relative, reverse=True)
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_compare_in_float64(corpus, tmp_path, capsys):
    command = f"compare {SMALL} --params-dtype float64 --train-iters 3 --hidden-dropout 0.2 --data-path"
    assert diptych(command, corpus, "--output-dir", tmp_path) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tolerances"] == {"loss": 1e-10, "gradient": 1e-12}
    assert all(abs(s["loss"]["torch"] - s["loss"]["jax"]) < 1e-10 for s in report["steps"])


MESHES = {
    "8 ranks": "--nproc 8 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --use-distributed-optimizer",
    "16 ranks": "--nproc 16 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --context-parallel-size 2",
}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(500)
@pytest.mark.parametrize("mesh", MESHES)
def test_compare_on_a_mesh(mesh, corpus, tmp_path):
    settings = SMALL.replace("--num-layers 1", "--num-layers 2").replace("--global-batch-size 2", "")
    command = (
        f"compare {settings} --global-batch-size 4 --micro-batch-size 1 --train-iters 2 --params-dtype float64 "
        f"--sequence-parallel --pipeline-timeout 400 {MESHES[mesh]} --output-dir {tmp_path} --data-path {corpus}"
    )
    words = [sys.executable, "-m", "parity.cli", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=480, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    assert report["replicas"] == 2
    assert len(report["steps"]) == 2
    assert all(abs(step["loss"]["torch"] - step["loss"]["jax"]) < 1e-10 for step in report["steps"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--nproc 3 --tensor-model-parallel-size 2",
            "expected a multiple of --tensor-model-parallel-size=2 ranks, got 3",
        ),
        ("--nproc 3", "--global-batch-size: expected a multiple of the 3 replicas, got 2"),
        ("--nproc 0", "--nproc: expected at least 1, got 0"),
    ],
)
def test_a_mesh_that_no_comparison_can_have_is_refused(flags, says, corpus, capsys):
    assert diptych(f"compare {SMALL} {flags} --data-path", corpus) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_compare_over_tolerance_names_parameter_and_step(corpus, tmp_path, capsys, monkeypatch):
    import jax_impl.mlp

    right = jax_impl.mlp.gelu
    monkeypatch.setattr(jax_impl.mlp, "gelu", lambda x, impl: right(x, impl) * 1.001)  # a seeded bug
    command = f"compare {SMALL} --activation gelu --train-iters 3 --data-path"
    assert diptych(command, corpus, "--output-dir", tmp_path) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "over tolerance gradient of decoder.layers.0.mlp.linear_fc" in printed
    assert "at step 0 in float64: expected a relative difference of at most 1.0e-12, got" in printed
    assert "first difference: decoder.layers.0.mlp (forward), between " in printed
    assert "equal within tolerance" not in printed


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_train_reports_progress_and_validation(backend, corpus, capsys):
    assert diptych(f"train --backend {backend} {SMALL} --train-iters 3 --log-interval 1 --data-path", corpus) == 0
    printed = capsys.readouterr().out
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("step")] == ["0", "1", "2"]
    assert "tok/s" in printed
    assert "validation loss:" in printed


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_loss_that_is_not_finite_ends_in_one_line(backend, corpus, capsys):
    command = f"train --backend {backend} {SMALL} --lr 1e30 --min-lr 0 --lr-warmup-iters 0 --clip-grad 0 --data-path"
    assert diptych(command, corpus) == 1
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert "diptych: step " in error
    assert "expected a finite loss and gradient norm" in error


WRONG = {
    "unknown flag": ("compare --hiden-size 3", "--hiden-size: expected a flag of diptych"),
    "unknown command": ("train-both", "train-both"),
    "no number": ("compare --hidden-size wide", "--hidden-size: expected an integer, got 'wide'"),
    "unknown choice": ("train --backend numpy", "--backend"),
    "heads": ("compare --num-attention-heads 3", "expected a divisor of --hidden-size=128, got 3"),
    "streams": ("compare --num-residual-streams 0", "--num-residual-streams: expected an integer >= 1, got 0"),
    "sinkhorn": ("train --sinkhorn-iterations 0", "--sinkhorn-iterations: expected an integer >= 1, got 0"),
    "dropout": ("compare --hidden-dropout -0.5", "--hidden-dropout: expected a number in [0, 1), got -0.5"),
    "pattern": ("train --layer-pattern attention,mamba", "--layer-pattern: expected a mixer out of"),
    "threads": ("train --num-threads 0", "--num-threads: expected at least 1, got 0"),
    "more threads than cores": ("train --num-threads 100000000", "--num-threads: expected at most this machine's"),
    "negative tolerance": ("compare --loss-tolerance -1", "--loss-tolerance: expected a finite number >= 0, got -1"),
    "no tolerance": ("compare --gradient-tolerance nan", "--gradient-tolerance: expected a finite number >= 0"),
    "too large": ("train --hidden-size 100000000000 --num-layers 1", "expected a run that fits this machine's memory"),
    "too large, jax": ("train --backend jax --hidden-size 100000000000", "expected a run that fits this machine's"),
    "device as corpus": ("train --data-path /dev/null", "--data-path: expected a file or folder"),
    "pattern too long": ("train --layer-pattern attention,attention,attention", "--layer-pattern: expected at most"),
    "result is a folder": ("compare --output-dir {blocked}", "expected a folder to write to"),
    "save folder": ("train --save {empty}/below", "expected a folder to write to"),
    "resume without a folder": ("train --resume", "save: expected a folder with resume, --resume-if-saved or"),
    "resume from nothing": ("train --save {out} --resume", "checkpoint: expected step_*.safetensors in"),
    "negative interval": ("train --save {out} --save-interval -1", "--save-interval: expected at least 0, got -1"),
    "exit before the start": ("train --exit-step 0", "--exit-step: expected at least 1, got 0"),
    "sample without a run": ("sample {out}", "checkpoint: expected a file or folder, got"),
    "sample nothing": ("sample {out} --length 0", "length: expected at least 1, got 0"),
    "info of no checkpoint": ("info {short}", "checkpoint: expected a whole checkpoint in"),
    "no config file": ("train --config {out}", "config: expected a TOML file in"),
    "no TOML": ("train --config {broken}", "config: expected a TOML file in"),
    "unknown setting in a file": ("train --config {unknown}", "--hiden-size: expected a flag of diptych"),
    "list in a list in a file": (
        "train --config {listed}",
        "config: expected text, a number, true, false or a list of them for --recompute-modules",
    ),
    "config without a file": ("train --config", "config: expected a subcommand before --config and a TOML file"),
    "corpus missing": ("train --data-path /nowhere/at/all", "--data-path: expected an existing file or folder"),
    "corpus empty": ("train --data-path {empty}", "--data-path: expected a corpus with text in it, got 0 bytes"),
    "corpus short": (
        "train --data-path {short}",
        "expected a training split of at least --seq-length + 1 = 129 tokens",
    ),
    "corpus short, compare": ("compare --output-dir {out} --data-path {short}", "expected a training split"),
    "corpus short for validation": (
        "train --data-path {medium}",
        "a validation split of at least --seq-length + 1 = 129",
    ),
    "vocabulary": ("compare --vocab-size 100", "--vocab-size: expected more than the corpus's largest token"),
    "output": ("compare --output-dir {empty}/below", "expected a folder to write to"),
    "picture": (
        "plan --pipeline-model-parallel-size 2 --picture {out}.pdf",
        "picture: expected a name that ends in .png or .svg, got",
    ),
    "schedule's name": (
        "plan --pipeline-model-parallel-size 2 --write-schedule {out}.txt",
        "--write-schedule: expected a name that ends in .csv, got",
    ),
    "schedule without a pipeline": (
        "plan --write-schedule {out}.csv",
        "--write-schedule: expected --pipeline-model-parallel-size above 1, got 1",
    ),
    "no such schedule": (
        "plan --pipeline-model-parallel-size 2 --pipeline-schedule-file {empty}/none.csv",
        "--pipeline-schedule-file: expected a schedule that runs, got",
    ),
    "locate without functions": ("locate", "locate: expected two functions, TORCH_FILE.py:FUNCTION"),
    "locate without a function": ("locate {short} {short}", "expected FILE.py:FUNCTION, got"),
    "locate no file": ("locate a.py:build b.py:build", "expected a Python file, got 'a.py', which does not exist"),
    "locate no names": (
        "locate examples/locate_a_bug.py:torch_side examples/locate_a_bug.py:jax_side --names {broken}",
        "--names: expected a TOML file of names, got",
    ),
    "locate no submodules": (
        "locate examples/locate_a_bug.py:torch_side examples/locate_a_bug.py:jax_side --modules {broken}",
        "--modules: expected a TOML file of names, got",
    ),
    "locate in no memory": ("locate a.py:build b.py:build --memory-limit -1", "--memory-limit: expected at least 0"),
    "locate no function": ("locate examples/locate_a_bug.py:side b.py:build", "expected a function 'side' in examples"),
    "locate no inputs": (
        "locate examples/locate_a_bug.py:jax_side examples/locate_a_bug.py:jax_side",
        "to return (module, inputs), got JaxModel",
    ),
    "picture's folder": (
        "plan --pipeline-model-parallel-size 2 --picture {empty}/below.png",
        "expected a folder to write to",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_ends_in_one_line_and_code_2(name, tmp_path, capsys):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("too short")
    (tmp_path / "blocked" / "report.json").mkdir(parents=True)
    (tmp_path / "broken").write_text("hidden_size = = 3")
    (tmp_path / "unknown").write_text("hiden_size = 3")
    (tmp_path / "listed").write_text("recompute_modules = [[1]]")
    (tmp_path / "medium").write_text("enough to train on " * 50)
    command, message = WRONG[name]
    paths = {
        name: tmp_path / name for name in ("empty", "short", "medium", "out", "blocked", "broken", "unknown", "listed")
    }
    assert diptych(command.format(**paths)) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1, error
    assert error.startswith("diptych: ")
    assert message in error


def test_config_file_is_read_and_flags_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'backend = "jax"\nsave = "somewhere"\n[model]\nhidden_size = 32\nadd-bias-linear = true\n'
        "enable_hyper_connections = false\n[train]\nlr = 2e-3\ntrain_iters = 7\n"
    )
    command = _parse(["train", "--train-iters", "9", "--config", str(file), "--num-layers", "3"])
    assert (command.backend, command.save) == ("jax", Path("somewhere"))
    assert (command.model.hidden_size, command.model.num_layers, command.model.add_bias_linear) == (32, 3, True)
    assert not command.model.enable_hyper_connections
    assert (command.train.lr, command.train.train_iters) == (2e-3, 9)


def test_help_names_the_seeds_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        diptych("compare --help")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for flag in ("--hidden-size", "--num-residual-streams", "--enable-hyper-connections", "--gradient-tolerance"):
        assert flag in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nproc 1", r"--pipeline-model-parallel-size=2 processes, got 1; give --nproc 2"),
        ("--nproc 3", r"nproc: expected a multiple of --pipeline-model-parallel-size=2 processes, got 3"),
        ("--nproc 0", r"nproc: expected at least 1, got 0"),
        ("--backend jax --nproc 3", r"nproc: expected a multiple of --pipeline-model-parallel-size=2 devices, got 3"),
        ("--nproc 2 --pipeline-model-parallel-layout Ettt|L", r"--pipeline-model-parallel-layout: expected"),
        ("--nproc 4 --global-batch-size 3", r"--global-batch-size: expected a multiple of the 2 replicas, got 3"),
        ("--nproc 4 --micro-batch-size 4", r"--micro-batch-size: expected a divisor of the 2 sequences each"),
        (
            "--nproc 2 --num-layers 4 --virtual-pipeline-model-parallel-size 2",
            r"expected at least --pipeline-model-parallel-size=2 with schedule 'interleaved', got 1",
        ),
        (
            "--nproc 2 --num-layers 4 --virtual-pipeline-model-parallel-size 2 --micro-batch-size 1 "
            "--microbatch-group-size-per-vp-stage 5",
            r"per-vp-stage: expected from --pipeline-model-parallel-size=2 to 4 microbatches, got 5",
        ),
    ],
)
def test_what_no_pipeline_can_have_is_refused_before_a_process_starts(arguments, message, corpus, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    command = f"train {SMALL.replace('--num-layers 1', '--num-layers 2')} --global-batch-size 4 {arguments}"
    assert diptych(command, "--pipeline-model-parallel-size", 2, "--data-path", corpus) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_validation_that_is_not_finite_is_no_success(backend, corpus, capsys):
    command = (
        f"train --backend {backend} {SMALL} --train-iters 1 --lr 1e30 --min-lr 1e30 --lr-warmup-iters 0 --data-path"
    )
    assert diptych(command, corpus) == 1
    assert "validation after step 0: expected a finite loss" in capsys.readouterr().err


def test_interruption_is_one_line(corpus, capsys, monkeypatch):
    import reference_torch.train

    def interrupted(self, step):
        raise KeyboardInterrupt

    monkeypatch.setattr(reference_torch.train.Trainer, "train_step", interrupted)
    assert diptych(f"train {SMALL} --data-path", corpus) == 130
    assert capsys.readouterr().err == "diptych: interrupted\n"


def test_report_of_a_broken_run_is_still_json(tmp_path):
    from parity.report import finite_json

    content = {"a": [float("nan"), 1.5, float("-inf")], "b": {"c": (float("inf"), 2)}}
    assert finite_json(content) == {"a": ["nan", 1.5, "-inf"], "b": {"c": ["inf", 2]}}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_installed_command_runs_in_32_bit_jax(corpus, tmp_path):
    """As a user runs it: a fresh process, JAX in its default 32-bit mode, warnings as errors."""
    command = Path(sys.executable).parent / "diptych"
    done = subprocess.run(
        [command, *f"compare {SMALL} --train-iters 3 --hidden-dropout 0.1".split(), "--data-path", corpus],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert (tmp_path / "runs" / "compare" / "report.json").exists()


def test_jax_is_not_one_of_several_processes(corpus, capsys, monkeypatch):
    """Each would train the whole model, and write the same files. Of every machine's processes one says so first."""
    message = "backend: expected 'torch' under torchrun, got 'jax'; start each of its processes by itself, with --coord"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(launch.CHILD, "1")
    waited = []
    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=waited.append))
    half = [launch.REPORT_SECONDS / 2]  # of a process of the launcher
    for rank, local_rank, waits in (("0", "0", []), ("1", "1", half), ("2", "0", []), ("3", "1", half)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        waited.clear()
        assert diptych(f"train --backend jax {SMALL} --data-path", corpus) == 2
        assert re.search(message, capsys.readouterr().err)
        assert waited == waits


LATE = """
import os, sys, time
time.sleep(4.0 * (os.environ["LOCAL_RANK"] == "0"))
from parity.cli.main import main
os._exit(main(sys.argv[1:]))
"""


@pytest.mark.multiprocess
def test_torchrun_does_not_end_who_speaks_before_it_has(corpus, tmp_path):
    """The first process to end has all others ended."""
    (tmp_path / "late.py").write_text(LATE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "late.py"]
    split = ["--num-layers", "2", "--pipeline-model-parallel-size", "2", "--data-path", corpus]
    done = subprocess.run(
        [*torchrun, "train", "--backend", "torch", *SMALL.split(), *split],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )
    says = "diptych: --nproc: expected a multiple of --pipeline-model-parallel-size=2 processes, got 3"
    assert done.stderr.count(says) == 1, done.stderr


def test_who_does_not_speak_does_so_where_nobody_has_ended_it(corpus, capsys, monkeypatch):
    """As torchrun does once the one that speaks has."""
    monkeypatch.setattr(launch, "REPORT_SECONDS", 0.2)
    monkeypatch.delenv(launch.CHILD, raising=False)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert diptych(f"train --backend jax {SMALL} --data-path", corpus) == 2
    assert "backend: expected 'torch'" in capsys.readouterr().err


@pytest.mark.multiprocess
@pytest.mark.parametrize("command", ["plan", "train --help"])
def test_a_reader_may_stop_reading(command):
    with subprocess.Popen(
        [sys.executable, "-m", "parity.cli", *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_processes_look_at_one_folder_at_once(tmp_path):
    """Each sees that it can be written to, and takes no other's file for its own."""
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda _: _check_output(tmp_path / "run", ()), range(2000))] == [None] * 2000
    assert not [*(tmp_path / "run").iterdir()]


def test_interpreted_kernels_have_threads_to_wait_in(monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)  # JAX is in use here
    monkeypatch.setenv("NPROC", "64")
    _load_backend("jax", "float32", 1, 2, "triton")
    assert os.environ["NPROC"] == "64"
    monkeypatch.delenv("NPROC")
    for impl, expected in (("auto", None), ("triton", "8")):
        _load_backend("jax", "float32", 1, 2, impl)
        assert os.environ.get("NPROC") == expected


@pytest.mark.slow
@pytest.mark.multiprocess
def test_interpreted_kernels_run_in_a_pipeline(corpus):
    """With arrays so long that callbacks of two devices and the exchange between them want a thread each."""
    sizes = "--hidden-size 64 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 64 --num-layers 2"
    training = "--train-iters 1 --eval-iters 1 --global-batch-size 4 --micro-batch-size 2"
    command = f"train --backend jax --impl triton --pipeline-model-parallel-size 2 {sizes} {training} --data-path"
    done = subprocess.run(
        [sys.executable, "-m", "parity.cli", *command.split(), str(corpus)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**{name: value for name, value in os.environ.items() if name != "NPROC"}, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "validation loss" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_training_with_recompute_is_training(backend, capsys):
    small = f"train --backend {backend} --hidden-size 16 --num-layers 3 --seq-length 8 --train-iters 3 --eval-iters 1"
    losses = []
    for flags in (
        "",
        "--recompute-granularity selective --recompute-modules mhc layernorm activation --mhc-recompute-layer-num 2",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
        "--recompute-activation-function",
    ):
        assert diptych(f"{small} {flags}") == 0
        out = capsys.readouterr().out
        losses.append(float(re.search(r"validation loss: ([0-9.]+)", out)[1]))
        assert ("recompute, blocks: " in out) == bool(flags)
    assert "1 of 1 layer: whole layers; 2 of 1 layer: activation" in out
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-6)
