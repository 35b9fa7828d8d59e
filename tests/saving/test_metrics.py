"""Metrics files that a crash or somebody else has changed: what can be read is kept, everything else is named."""

import json

import pytest

from parity.cli.main import main
from parity.cli.run import METRICS, Metrics, read_metrics
from tests.backends import BACKENDS
from tests.command import diptych

SMALL = (
    "--hidden-size 16 --num-layers 1 --num-attention-heads 2 --seq-length 8 --eval-iters 1 --global-batch-size 2 "
    "--train-iters 4 --lr-warmup-iters 2 --eval-interval 2"
)


def line(step: int, **more) -> str:
    return json.dumps({"backend": "torch", "step": step, "loss": 1.0, **more})


def test_a_line_of_zero_bytes_loses_no_other(tmp_path):
    path = tmp_path / METRICS
    path.write_bytes(f"{line(0)}\n".encode() + b"\0" * 300 + f'\n{line(1)}\n{line(2)}\n{{"step": 3, "lo'.encode())
    assert [found["step"] for found in read_metrics(path)] == [0, 1, 2]
    Metrics(tmp_path, 2, "torch").write({"step": 2, "loss": 5.0})
    assert [found["loss"] for found in read_metrics(path)] == [1.0, 1.0, 5.0]


def test_a_byte_order_mark_loses_no_line(tmp_path):
    (tmp_path / METRICS).write_text(f"{line(0)}\n{line(1)}\n", encoding="utf-8-sig")
    assert [found["step"] for found in read_metrics(tmp_path / METRICS)] == [0, 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", "got 5; remove it"),
        ("[1]", r"got \[1\]"),
        ("null", "got None"),
        ('{"backend": "torch"}', "got step None"),
        (line(True), "got step True"),
        (line(-1), "got step -1"),
        ('{"step": 1, "loss": 2.0}', "got backend None"),
        (line(1, loss="low"), "got loss 'low'"),
        (line(1, loss=True), "got loss True"),
        (line(1, validation_loss=10**400), "got validation_loss 1000"),
    ],
)
def test_a_line_that_no_run_writes_is_named(text, expected, corpus, tmp_path, capsys):
    run = tmp_path / "run"
    train = f"train {SMALL} --data-path {corpus} --save {run}"
    assert diptych(f"{train} --exit-step 2") == 0
    path = run / METRICS
    whole = path.read_text() + text + "\n" + line(1) + "\n"
    path.write_text(whole)
    message = rf"metrics: expected results of a step in line 4 of .*{METRICS}, {expected}"
    with pytest.raises(ValueError, match=message):
        read_metrics(path)
    for command in (f"{train} --resume", f"curves {run} --output {tmp_path}/c.png"):
        assert diptych(command) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert path.read_text() == whole


def test_a_folder_named_like_the_metrics(tmp_path):
    (tmp_path / METRICS).mkdir()
    with pytest.raises(ValueError, match=r"metrics: expected a file, got .*, which is not one; rename it"):
        read_metrics(tmp_path / METRICS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_finished_run_that_is_resumed_has_its_lines_once(backend, corpus, tmp_path):
    run = tmp_path / "run"
    train = f"train {SMALL} --backend {backend} --data-path {corpus} --save {run}"
    assert diptych(train) == 0
    before = (run / METRICS).read_text()
    for _ in range(2):
        assert diptych(f"{train} --resume") == 0
    assert (run / METRICS).read_text() == before


def test_names_in_brackets_are_no_markup(corpus, tmp_path, capsys):
    run = tmp_path / "[red]run[" / "x]"
    text = tmp_path / "[" / "bold]"
    text.parent.mkdir()
    text.write_bytes(corpus.read_bytes())
    assert main(["train", *SMALL.split(), "--data-path", str(text), "--save", str(run)]) == 0
    printed = capsys.readouterr().out.replace("\n", "")
    assert f"corpus: {text}" in printed
    assert f"saved: {run}" in printed
    assert main(["train", *SMALL.split(), "--data-path", str(text), "--save", str(run), "--resume"]) == 0
    assert f"from {run}" in capsys.readouterr().out.replace("\n", "")
    assert main(["info", str(run)]) == 0
