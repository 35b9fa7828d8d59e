"""Changed or forged files: each is read correctly, or refused with one error of this project.

A program is a kind of file and its changes. Harmless changes (a byte order mark, line ends) must not change the result.
After other changes, the reader returns what an independent reader finds, or an error that names the file.
"""

import contextlib
import json
import math
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from diptych.planner.stage_costs import read_stage_costs
from diptych.plans.checkpoint import CheckpointError, read_checkpoint
from diptych.plans.config import DataConfig
from diptych.plans.model.data import load_corpus
from diptych.plans.schedule.csv import read_schedule, schedule_to_csv
from parity.cli.config_file import with_config_file
from parity.cli.curves import write_curves
from parity.cli.run import Metrics, read_metrics
from reference_torch.saving import load_model
from tests.fuzz.grammars import _file_contents as contents
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong, bounded_memory

KINDS = ("toml", "costs", "csv", "metrics", "corpus", "checkpoint")
HARMLESS = ("nothing", "byte order mark", "carriage returns", "line ends")
BYTES = ("cut", "zeros", "flip", "no UTF-8", "insert", "double", "empty", "UTF-16")
"""Changes of bytes at random positions."""
DEEP = "[" * 10**5 + "]" * 10**5
TEXTS = ("[" * 10**5, DEEP, '{"a":' * 10**5, "1" * 5000, "\u2028", ",", '"', "é", "=", "\n", "\x00", "#")
CELLS = (
    "0F",
    "F0",
    "9F0",
    "0F99999999",
    "0F" + "9" * 5000,
    "٣F٣",
    "0F0;0F1",
    "(0F2;1B0)OVERLAP_F_B",
    "0SEND_F0",
    "-1F0",
)
CELLS += ("x" * 200_000, "0f0", "0B0", "2W3", "", " 0F0 ", '"0F0"', '"', "0F0\x00", "00F00")
METRIC_LINES = ("[1]", "7", "null", '"text"', "{}", '{"step": null}', '{"step": 1e400, "loss": 1}', '{"step": true}')
METRIC_LINES += ('{"step": 1, "loss": null}', '{"step": 1, "backend": 5}', '{"step": 1' + "0" * 400 + "}", "\0" * 1000)
METRIC_LINES += ("{", "", '{"step": 1, "loss": ' + "1" * 5000 + "}", "[" * 10**5, '{"step": 1, "x": ' + DEEP + "}")
METRIC_LINES += ('{"step": 2, "loss": NaN}', '{"step": 1, "loss": 1e308}', '{"step": 3, "validation_loss": -Infinity}')
FOLDERS = ("one file", "hidden", "empty folder", "empty file", "loop", "missing", "device", "two", "binary")
HARD_CASES = frozenset({*KINDS, "changed", "harmless", "bytes", "deep", "huge number", "forged", "curves"})
INTERNALS = re.compile(
    r"Traceback|object at 0x|<class|KeyError|IndexError|unhashable|invalid literal|recursion|JSONDecode"
)
SECONDS = 20.0
"""Limit of the processor time for one file."""


class File(NamedTuple):
    """A kind of file and its changes, with the position of each change as a share of the file."""

    kind: str
    changes: tuple[tuple[str, Any, float], ...]
    draws_curves: bool = False


def draw(rng: np.random.Generator) -> File:
    """Draw a file and one or two changes."""
    kind = _one(rng, KINDS)
    if rng.random() < (0.3 if kind == "corpus" else 0.4):
        names = ("nothing",) if kind in ("checkpoint", "corpus") else HARMLESS
        change = "forge" if kind == "checkpoint" else _one(rng, names)
        detail = _one(rng, [*contents.POSSIBLE]) if kind == "checkpoint" else None
        return File(kind, ((change, detail, 0.0),), kind == "metrics" and rng.random() < 0.2)
    count = 1 + (rng.random() < 0.25)
    changes = tuple(_change(rng, kind) for _ in range(count))
    if any(name == "forge" for name, _, _ in changes):
        changes = tuple(change for change in changes if change[0] == "forge")[:1]
    return File(kind, changes, kind == "metrics" and rng.random() < 0.2)


def _change(rng: np.random.Generator, kind: str) -> tuple[str, Any, float]:
    place = round(float(rng.random()), 4)
    if kind == "corpus":
        return "corpus", _one(rng, FOLDERS), place
    if kind == "checkpoint" and rng.random() < 0.75:
        return "forge", _one(rng, [*contents.IMPOSSIBLE, *contents.RAW]), place
    if kind == "checkpoint" or rng.random() < 0.35:
        name = _one(rng, BYTES)
        return name, int(rng.integers(len(TEXTS))) if name == "insert" else int(rng.integers(1, 256)), place
    if kind == "costs":
        name = _one(rng, ("entry", "number", "missing", "names", "twice", "deep about", "more"))
        return name, _one(rng, [*contents.ODD]), place
    names = {"toml": "line", "csv": "cell", "metrics": "row"}
    details = {"toml": [*contents.TOML_LINES], "csv": range(len(CELLS)), "metrics": range(len(METRIC_LINES))}
    return names[kind], _one(rng, details[kind]), place


def features(program: File) -> Iterable[str]:
    """Name the kind of a file and of its changes."""
    yield program.kind
    if program.draws_curves:
        yield "curves"
    for name, detail, _ in program.changes:
        harmless = name in HARMLESS or detail in contents.POSSIBLE
        yield "harmless" if harmless else "changed"
        if name in BYTES:
            yield "bytes"
        if name == "forge":
            yield "forged"
        text = TEXTS[detail] if name == "insert" else METRIC_LINES[detail] if name == "row" else str(detail)
        if "nested" in text or "deep" in f"{name} {text}" or "[[[[" in text:
            yield "deep"
        if "digits" in text or "1e308" in text or "1" * 400 in text or "0" * 400 in text:
            yield "huge number"


def check(program: File) -> Outcome:
    """Write the file, read it, and compare the result with that of an independent reader.

    Raises:
        Wrong: if the result is wrong, an error does not name the file, or reading takes too long.
    """
    folder = Path(tempfile.mkdtemp(prefix="fuzz_files"))
    contents.checkpoint_bytes()  # made once
    started = time.process_time()
    try:
        with bounded_memory():
            return _READERS[program.kind](program, folder)
    except (ValueError, CheckpointError) as error:
        return Outcome(REFUSED, _judged(program, error, folder))
    finally:
        shutil.rmtree(folder)
        if time.process_time() - started > SECONDS:
            raise Wrong(f"it took {time.process_time() - started:.1f} s of processor time")


def _judged(program: File, error: Exception, folder: Path) -> str:
    """Return the message of a refusal without drawn values, or raise Wrong if the message is bad."""
    if _is_harmless(program):
        raise Wrong(f"a right file is refused: {error}") from error
    text = str(error)
    if type(error) not in (ValueError, CheckpointError) or str(folder) not in text:
        raise Wrong(
            f"expected an error of ours that names the file, got {type(error).__name__}: {text[:500]}"
        ) from error
    if found := INTERNALS.search(text):
        raise Wrong(f"internals in a message: {found[0]!r} in {text[:500]}") from error
    if len(text) > 2000 or "\n" in text.strip():
        raise Wrong(f"expected a message of one line, got {len(text)} characters: {text[:300]!r}") from error
    return f"{program.kind}: " + re.sub(r"'[^']*'|/tmp/\S+|\d+", "_", text)


def _is_harmless(program: File) -> bool:
    return all(name in HARMLESS or detail in contents.POSSIBLE for name, detail, _ in program.changes)


def _one(rng: np.random.Generator, among: Any) -> Any:
    return among[int(rng.integers(len(among)))]


def _changed(content: bytes, program: File) -> bytes:
    """Apply the changes that do not depend on the kind of file."""
    for name, detail, share in program.changes:
        place = int(share * len(content))
        if name == "byte order mark":
            content = b"\xef\xbb\xbf" + content
        elif name == "carriage returns":
            content = content.replace(b"\n", b"\r\n")
        elif name == "line ends":
            content += b"\n\n"
        elif name == "cut":
            content = content[:place]
        elif name == "zeros":
            content = content[:place] + bytes(detail) + content[place + detail :]
        elif name == "flip" and content:
            content = content[:place] + bytes([content[place] ^ detail]) + content[place + 1 :]
        elif name == "no UTF-8":
            content = content[:place] + b"\xff\xfe\x80" + content[place:]
        elif name == "insert":
            content = content[:place] + TEXTS[detail].encode() + content[place:]
        elif name == "double":
            content += content
        elif name == "empty":
            content = b""
        elif name == "UTF-16":
            content = content.decode(errors="replace").encode("utf-16")
    return content


def _toml(program: File, folder: Path) -> Outcome:
    text = contents.TOML
    for name, detail, share in program.changes:
        if name == "line":
            lines = text.split("\n")
            place = len(lines) if "[" in contents.TOML_LINES[detail][:1] else int(share * len(lines))
            text = "\n".join([*lines[:place], contents.TOML_LINES[detail], *lines[place:]])
    path = folder / "config.toml"
    path.write_bytes(_changed(text.encode(), program))
    found = with_config_file(["train", "--config", str(path), "--after"])
    plain: list[str] = []
    seen: set[str] = set()

    def flatten(table: dict[str, Any]) -> None:
        for key, value in table.items():
            name = key.replace("_", "-")
            if isinstance(value, dict):
                flatten(value)
                continue
            if name in seen:
                raise Wrong(f"{name} is there twice, and one was taken")
            seen.add(name)
            if isinstance(value, bool):
                plain.append(f"--{name}" if value else f"--no-{name}")
            else:
                plain.extend([f"--{name}", *map(str, value if isinstance(value, list) else [value])])

    flatten(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    _same(found, ["train", *plain, "--after"])
    if _is_harmless(program):
        _same(plain, contents.TOML_FLAGS)
    return Outcome(EQUAL)


def _costs(program: File, folder: Path) -> Outcome:
    value: dict[str, Any] = dict(contents.COSTS)
    names = [*contents.COSTS]
    for change, detail, share in program.changes:
        name = names[int(share * len(names))]
        odd = contents.ODD.get(detail)
        if change == "entry":
            value[name] = odd
        elif change == "number" and isinstance(value.get(name), list):
            value[name] = [odd, *value[name][1:]]
        elif change == "missing":
            value.pop(name, None)
        elif change == "names":
            value |= {f"{detail[:10]}{number}": 1 for number in range(60_000)}
        elif change == "more" and isinstance(value.get(name), list):
            value[name] = value[name] * 1000
    text = json.dumps(value, indent=1)
    for change, _, share in program.changes:
        if change == "twice":
            text = text[:-1] + f', "{names[int(share * len(names))]}": 1}}'
        elif change == "deep about":
            text = text[:-1] + ', "about": ' + "[" * 10**5 + "]" * 10**5 + "}"
    path = folder / "costs.json"
    path.write_bytes(_changed(text.encode(), program))
    found = read_stage_costs(path, 2)
    plain = json.loads(path.read_text(encoding="utf-8-sig"))
    fields = ("forward", "input_gradient", "weight_gradient")
    for name, field in zip(names, fields, strict=False):
        _same(getattr(found.costs, field), plain[name])
    _same(found.costs.communication, plain["communication_seconds"])
    if found.has_bytes:
        _same(found.costs.activation_bytes, plain["activation_bytes"])
    numbers = [*np.ravel([getattr(found.costs, field) for field in fields]), found.costs.communication]
    if not math.isfinite(sum(numbers) * 1e6) or min(numbers) < 0:
        raise Wrong(f"costs that no schedule can have: {numbers}")
    return Outcome(EQUAL)


def _csv(program: File, folder: Path) -> Outcome:
    rows = [row.split(",") for row in contents.schedule_text().splitlines()]
    for name, detail, share in program.changes:
        if name == "cell":
            row = rows[int(share * len(rows))]
            row[int(share * 97) % len(row)] = CELLS[detail]
    path = folder / "schedule.csv"
    path.write_bytes(_changed("".join(",".join(row) + "\n" for row in rows).encode(), program))
    found = read_schedule(path)
    text = path.read_text(encoding="utf-8-sig").replace('"', "")
    pairs = re.sub(r"\(([^()]*);([^()]*)\)OVERLAP_F_B", r"\1,\2", text)
    pairs = re.sub(r"[0-9]+", lambda digits: str(int(digits[0])), pairs)  # 00F00 is 0F0
    plain = [[cell.strip() for cell in row.split(",") if cell.strip()] for row in pairs.splitlines()]
    while plain and not plain[-1]:
        plain.pop()
    _same([row.split(",") for row in schedule_to_csv(found).splitlines()], plain)
    return Outcome(EQUAL)


def _metrics(program: File, folder: Path) -> Outcome:
    lines = [json.dumps(line) for line in contents.METRICS]
    for name, detail, share in program.changes:
        if name == "row":
            lines.insert(int(share * len(lines)), METRIC_LINES[detail])
    content = _changed("".join(f"{line}\n" for line in lines).encode(), program)
    path = folder / "metrics.jsonl"
    path.write_bytes(content)
    found = read_metrics(path)
    untouched = {json.dumps(line) for line in contents.METRICS} & {
        line.strip(b"\r\xef\xbb\xbf").decode(errors="replace") for line in content.split(b"\n")
    }
    read = [json.dumps(line) for line in found]
    if lost := untouched - {*read}:
        raise Wrong(f"lines are lost: {lost}")
    if _is_harmless(program):
        _same(read, [json.dumps(line) for line in contents.METRICS])
    for line in found:
        if type(line["step"]) is not int or not 0 <= line["step"] < 2**63:
            raise Wrong(f"a step that is none: {line!r:.200}")
    remaining = [line for line in found if line["step"] < 3 or ("validation_loss" in line and line["step"] == 3)]
    with mock.patch.dict(sys.modules, {"tensorboard.summary": None}):  # its writer starts a permanent thread
        Metrics(folder, 3, "torch").write({"step": 3, "loss": 1.0})
    _same([json.dumps(line) for line in read_metrics(path)[:-1]], [json.dumps(line) for line in remaining])
    if program.draws_curves:
        path.write_bytes(content)
        write_curves([folder], folder / "curves.png")
    return Outcome(EQUAL)


def _corpus(program: File, folder: Path) -> Outcome:
    name, detail, share = program.changes[0]
    path = folder / "text"
    text = b"the quick brown fox\n" * 40
    files = {"a": text}
    files |= {"two": {"b": text}, "binary": {"b": bytes(range(256))}}.get(detail, {})
    files |= {"hidden": {".b": text}, "empty file": {"a": b""}, "loop": {}}.get(detail, {})
    if name != "nothing" and detail not in ("one file", "missing", "device"):
        path.mkdir()
        for file, content in files.items() if detail != "empty folder" else ():
            (path / file).write_bytes(content)
        if detail == "loop":
            (path / "loop").symlink_to(path)
    elif detail == "device":
        path.symlink_to("/dev/zero")
    elif detail != "missing":
        path.write_bytes(text)
    found = load_corpus(DataConfig(data_path=path, validation_fraction=0.3, reset_attention_mask=share < 0.5))
    plain = b"\n".join(content for file, content in sorted(files.items()) if not file.startswith("."))
    _same(found.training.tobytes() + found.validation.tobytes(), plain)
    found.check(8, 256)
    batch = found.batch(3, 2, 8)
    _same(batch.tokens[:, 1:].tolist(), batch.targets[:, :-1].tolist())
    return Outcome(EQUAL)


def _checkpoint(program: File, folder: Path) -> Outcome:
    name, detail, _ = program.changes[0]
    path = folder / "forged.safetensors"
    plain = contents.checkpoint_bytes()
    path.write_bytes(contents.forged(detail) if name == "forge" else _changed(plain, program))
    found = read_checkpoint(path)
    if not _is_harmless(program) and path.read_bytes() != plain:
        model = found.settings["model"]
        if model["num_layers"] == 2 and model["hidden_size"] == 16 and model["vocab_size"] == 256:
            with contextlib.suppress(ValueError):
                load_model(path)
        raise Wrong("a checkpoint that none of ours can be is read")
    model = load_model(path)
    for parameter, value in model.named_parameters():
        stored = found.arrays[f"model.{parameter}"]
        if not np.array_equal(value.detach().numpy(), stored):
            raise Wrong(f"{parameter} differs from the file's")
    return Outcome(EQUAL)


_READERS: dict[str, Callable[[File, Path], Outcome]] = {
    "toml": _toml,
    "costs": _costs,
    "csv": _csv,
    "metrics": _metrics,
    "corpus": _corpus,
    "checkpoint": _checkpoint,
}


def _same(found: Any, expected: Any) -> None:
    if found != expected:
        raise Wrong(f"expected {expected!r:.500}, got {found!r:.500}")
