"""Standard output that closes early, was never open, is full, or lacks letters: nothing computed is lost."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diptych.plans.checkpoint import read_checkpoint
from diptych.plans.model.sampling import next_token, text_of
from parity.cli.main import main
from parity.cli.output import StandardOutput, output_failure, standard_output
from tests.backends import BACKENDS
from tests.saving.support import CONFIG, TRAIN, new_trainer, steps

ROOT = Path(__file__).parents[2]
SMALL = (
    "--hidden-size 16 --num-layers 1 --num-attention-heads 2 --seq-length 8 --eval-iters 1 --global-batch-size 2 "
    "--train-iters 4000 --lr-warmup-iters 2 --log-interval 1"
)


def shell(command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a line of bash in which ``diptych`` is the command."""
    prelude = f'set -o pipefail; diptych() {{ {sys.executable} -m parity.cli "$@"; }}; '
    done = ["bash", "-c", prelude + command]
    return subprocess.run(
        done, capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | environment, check=False
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize("command", ["info {}", "sample {} --length 3 --prompt a", "train --help", "plan"])
def test_output_that_nobody_reads_is_no_error(command, saved):
    done = shell(f"diptych {command.format(saved)} | true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.multiprocess
@pytest.mark.parametrize("command", ["info {}", "sample {} --length 3 --prompt a"])
def test_output_that_was_closed_from_the_start(command, saved):
    done = shell(f"diptych {command.format(saved)} >&-")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.multiprocess
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_is_full_is_told(saved):
    done = shell(f"diptych info {saved} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "diptych: standard output: No space left on device\n")


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", ["", "--micro-batch-size 1 --nproc 2"])
def test_a_run_whose_output_closes_is_saved(ranks, corpus, tmp_path):
    run = tmp_path / "run"
    done = shell(f"diptych train {SMALL} {ranks} --data-path {corpus} --save {run} | head -4")
    assert done.returncode == 0, done.stderr
    step = read_checkpoint(run).step
    assert 0 < step < 4000
    message = f"stopped by standard output, which was closed, after step {step - 1}; continue with --resume"
    assert done.stderr == f"diptych: {message}\n"


@pytest.mark.multiprocess
def test_a_run_without_output_from_the_start_goes_on_to_its_end(corpus, tmp_path):
    run = tmp_path / "run"
    short = SMALL.replace("4000", "6")
    done = shell(f"diptych train {short} --data-path {corpus} --save {run} >&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert read_checkpoint(run).step == 6


@pytest.mark.multiprocess
def test_an_ascii_terminal_shows_escapes(saved):
    done = shell(f"diptych sample {saved} --length 1 --prompt äö", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(r"\xe4\xf6")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample_of_more_tokens_than_bytes(backend, tmp_path, capsys):
    trainer = new_trainer(backend, replace(CONFIG, vocab_size=400), TRAIN)
    steps(trainer, 0, 1)
    trainer.save(tmp_path)
    command = ["sample", str(tmp_path), "--backend", backend, "--length", "40", "--temperature", "1e9"]
    assert main([*command, "--prompt", "caf\udce9"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("caf")
    assert "<" in printed.out
    note = f"the text grows to 44 tokens; each is predicted from the last {CONFIG.seq_length} (seq_length)"
    assert printed.err == f"diptych: {note}\n"


def test_a_sample_within_the_context_prints_no_note(saved, capsys):
    assert main(["sample", str(saved), "--length", str(CONFIG.seq_length), "--prompt", "a"]) == 0
    assert capsys.readouterr().err == ""


def test_text_of_tokens():
    assert text_of([104, 105]) == "hi"
    assert text_of([104, 0xC3, 0xA4, 300, 256, 105, 0xFF]) == "hä<300><256>i\N{REPLACEMENT CHARACTER}"
    assert text_of([]) == ""


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-3])
def test_a_temperature_near_0_takes_the_likeliest(temperature):
    for place in range(4):
        logits = np.array([0.0, -1.0, 1.0, -3.0])
        logits[place] = 5.0
        for index in range(20):
            assert next_token(logits, temperature, 0, index) == place
            assert next_token(logits.astype(np.float32), temperature, 0, index) == place


def test_a_high_temperature_takes_any():
    drawn = {next_token(np.array([1e308, 0.0, -1e308]), np.inf, 0, index) for index in range(100)}
    assert drawn == {0, 1, 2}
    assert {next_token(np.array([1e308, -1e308, 1e308]), 1.0, 0, index) for index in range(100)} == {0, 2}


class _Closing(io.StringIO):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self._left = letters

    def write(self, text: str) -> int:
        self._left -= len(text)
        if self._left < 0:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_stream_that_fails_is_written_to_no_more():
    stream = _Closing(5)
    output = StandardOutput(stream)
    assert [output.write(text) for text in ("abc", "def", "g")] == [3, 3, 1]
    assert stream.getvalue() == "abc"
    assert isinstance(output_failure(output), BrokenPipeError)
    assert output_failure(stream) is None
    assert not output.isatty()


def test_standard_output_is_put_back():
    before = sys.stdout
    with contextlib.suppress(KeyError), standard_output() as output:
        assert sys.stdout is output
        raise KeyError
    assert sys.stdout is before
