"""Changed Hugging Face folders: each is converted as transformers reads it, or refused with one line that names why.

A program is a tiny folder of a family, a command (import, export or plan) and changes of config.json, weights, index or
folder. Harmless changes give the parameters of the unchanged folder, bitwise. After other changes, an accepted folder
has the settings and the weights that transformers reads. A refusal leaves no file behind.
"""

import contextlib
import copy
import io
import json
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch

from diptych.plans.checkpoint import read_checkpoint, recorded_model
from diptych.plans.config import TransformerConfig
from diptych.plans.families import find_family
from diptych.plans.families.family import settings_of
from diptych.plans.families.folder import CONFIG, INDEX, SINGLE, import_folder
from parity.cli.main import main
from tests.families.models import FAMILIES, transformers
from tests.fuzz.grammars._folder_changes import (
    BYTES,
    CONFIG_CHANGES,
    TYPES,
    Base,
    Draft,
    base,
    change_bytes,
    change_config,
    changed_keys,
    unused_keys,
)
from tests.fuzz.grammars._folder_weights import (
    HEADERS,
    INDICES,
    TENSORS,
    change_header,
    change_index,
    change_tensor,
)
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong, bounded_memory

COMMANDS = ("import", "import", "import", "import", "export", "plan")
HARMLESS = {
    "config": ("nothing", "byte order mark", "line ends", "order", "one line", "more keys"),
    "weights": ("nothing", "order", "metadata", "shards", "mtp", "other files", "names"),
}
"""Changes after which every result stays the same."""
PLACES = {
    "import": (
        *("no folder", "a file as folder", "no config.json", "a folder as config.json", "no weights"),
        *("a folder as weights", "a folder as index", "a folder as tokenizer", "a folder as shard", "no shard"),
        *("output is a file", "output in a file", "output has a checkpoint", "output has metrics", "source is a file"),
        *("output in the folder", "output has files", "output has a folder as checkpoint"),
    ),
    "export": (
        *("no folder", "a file as folder", "no config.json", "a folder as config.json", "no weights"),
        *("output is a file", "output in a file", "output has config.json", "output has weights"),
        *("output has an index", "output is the folder", "output has files"),
    ),
    "plan": ("no folder", "a file as folder", "no config.json", "a folder as config.json"),
}
"""Changes of files as a whole, by command."""
PLAUSIBLE = (
    *("missing", "missing", "missing", "old key", "old key", "number", "list", "plus 1", "halved", "doubled"),
    *("offsets", "offsets", "offsets", "offsets", "shape", "entry missing", "trailing bytes"),
    *("of the first",) * 6,
    *("another head", "another head", "more", "in two shards", "beside one file", "other"),
)
"""Changes and details that are drawn more often, because the result looks right."""
NOT_REFUSED = ("a folder as tokenizer", "output in the folder", "output has files")
NAMES = ("theirs", "théirs [red] of 'it'")
"""Names of folders."""
HARD_CASES = frozenset(
    {"import", "export", "plan", "config", "bytes", "header", "tensor", "index", "place", "harmless"}
)
INTERNALS = re.compile(
    r"Traceback|object at 0x|<class|KeyError|IndexError|TypeError|unhashable|invalid literal|recursion|JSONDecode|"
    r"machine's memory|embedded null|codec can't encode|surrogates not allowed"
)
NAMED = re.compile(r"config\.json|--family|(nan|inf) in model\.")
"""What a message names, if not a file."""
NEEDLESS = ("expected float, got int", "KeyError: 'metadata'")
"""Errors of transformers for folders of one meaning: an integer as float, and an index without its size."""
SECONDS = 20.0
"""Limit of the processor time for one folder."""


class Change(NamedTuple):
    """A change of a part of the folder, at a position given as a share."""

    part: str
    name: str
    detail: str = ""
    place: float = 0.0


class Program(NamedTuple):
    """A folder of a family and its changes, and the command that reads it."""

    command: str
    family: str
    dtype: str
    tied: bool
    sharded: bool
    name: str
    changes: tuple[Change, ...]


def draw(rng: np.random.Generator) -> Program:
    """Draw a folder, and one to three changes."""
    command, family = _one(rng, COMMANDS), _one(rng, [*FAMILIES])
    dtype = _one(rng, ("float64", "float32", *TYPES)) if command == "import" else "float64"
    chance = rng.random()
    if chance < 0.25:
        parts = ["config"] if command == "plan" else ["config", "weights"]
        changes = [Change(part, f"harmless {_one(rng, HARMLESS[part])}", "", _place(rng)) for part in parts]
    elif chance < 0.35:
        changes = [Change("place", _one(rng, PLACES[command]))]
    elif chance < 0.7 or command != "import":
        changes = [_drawn(rng, "config", CONFIG_CHANGES) for _ in range(1 + (rng.random() < 0.3))]
        if rng.random() < 0.2:
            changes = [_drawn(rng, "bytes of config", BYTES)]
    else:
        parts = {"header": HEADERS, "tensor": TENSORS, "index": INDICES, "bytes of index": BYTES}
        part = _one(rng, ("header", "header", "tensor", "tensor", "index", "index", "bytes of index"))
        changes = [_drawn(rng, part, parts[part])]
        if rng.random() < 0.15:
            changes.insert(0, _drawn(rng, "config", CONFIG_CHANGES))
    name = NAMES[rng.random() < 0.15]
    tied, sharded = family != "kimi_linear" and bool(rng.random() < 0.3), bool(rng.random() < 0.3)
    return Program(command, family, dtype, tied, sharded and command == "import", name, tuple(changes))


def _drawn(rng: np.random.Generator, part: str, table: dict[str, tuple[str, ...]]) -> Change:
    name = _one(rng, [*table, *(name for name in PLAUSIBLE if name in table)])
    details = [*table[name], *(detail for detail in PLAUSIBLE if detail in table[name])]
    return Change(part, name, _one(rng, details), _place(rng))


def _place(rng: np.random.Generator) -> float:
    return int(rng.integers(10_000)) / 10_000


def _one(rng: np.random.Generator, among: Any) -> Any:
    return among[int(rng.integers(len(among)))]


def features(program: Program) -> Iterable[str]:
    """Name the command and the parts that are changed."""
    yield program.command
    for change in program.changes:
        yield "harmless" if change.name.startswith("harmless") else change.part.split()[0]


def check(program: Program) -> Outcome:
    """Write the folder, run the command, and compare the result with that of transformers.

    Raises:
        Wrong: if the result is wrong, a message names nothing, files remain, or it takes too long.
    """
    plain = base(program.family, program.dtype, program.tied)  # made once
    root = Path(tempfile.mkdtemp(prefix="fuzz_folders"))
    try:
        case = _Case(program, plain, root)
        before = _snapshot(root)
        started = time.process_time()
        code, out, err = _run(case.arguments)
        if time.process_time() - started > SECONDS:
            raise Wrong(f"it took {time.process_time() - started:.1f} s of processor time")
        case.check_others(before)
        if code:
            if _snapshot(root) != before:
                raise Wrong(f"a refusal left files: {sorted({*_snapshot(root)} ^ {*before})}")
            return Outcome(REFUSED, _judged(case, code, err))
        if err.strip():
            raise Wrong(f"done, with standard error {err!r:.500}")
        case.check_result(out)
        return Outcome(EQUAL)
    finally:
        shutil.rmtree(root)


def _run(arguments: list[str]) -> tuple[Any, str, str]:
    """Run a command in this process and return its exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), bounded_memory():
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def _judged(case: "_Case", code: Any, err: str) -> str:
    """Return the message of a refusal without drawn values, or raise Wrong if the message is bad."""
    if case.is_harmless:
        raise Wrong(f"a right folder is refused: {err!r:.1000}")
    text = err.removeprefix("diptych: ").rstrip("\n")
    if code not in (1, 2) or not err.startswith("diptych: ") or "\n" in text or len(text) > 2000:
        raise Wrong(f"expected one line that begins with diptych:, and exit code 1 or 2, got {code!r}: {err!r:.1000}")
    if not re.search(r"expected .*got ", text) or not (str(case.root) in text or NAMED.search(text)):
        raise Wrong(f"expected a message that names the file, what was expected and what came, got {text!r}")
    if found := INTERNALS.search(text):
        raise Wrong(f"internals in a message: {found[0]!r} in {text!r}")
    return f"{case.program.command}: " + re.sub(r"'[^']*'|/tmp/\S+|\d+", "_", text)


def _snapshot(root: Path) -> dict[str, bytes]:
    """Return the contents of all files."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class _NotLoadedError(Wrong):
    """A folder that transformers refuses, and this project accepts."""


class _Case:
    """The files of a program.

    Args:
        program: the program.
        plain: the unchanged folder.
        root: an empty folder for all files.
    """

    def __init__(self, program: Program, plain: Base, root: Path) -> None:
        self.program, self.plain, self.root = program, plain, root
        self.theirs, self.ours, self.again = root / program.name, root / "ours", root / "again"
        outside = plain.draft()
        outside.write(root / "outside")  # weights that no command may read
        draft = plain.draft()
        if program.sharded:
            draft.split()
        if program.command == "export":
            draft.write(self.theirs)
            import_folder(self.theirs, self.ours)
            draft = plain.draft()
            draft.headers, draft.payloads, draft.index = {}, {}, None
        for change in program.changes:
            self._apply(draft, change)
        if program.command == "export":
            shutil.rmtree(self.ours / "source")
            draft.write(self.ours / "source")
        else:
            draft.write(self.theirs)
        self.changed = self.ours / "source" if program.command == "export" else self.theirs
        """The folder that is changed."""
        for change in program.changes:
            if change.part == "place":
                self._move(change.name)

    @property
    def arguments(self) -> list[str]:
        """The command line."""
        return {
            "import": ["import", str(self.theirs), "--output", str(self.ours)],
            "export": ["export", str(self.ours), str(self.again)],
            "plan": ["plan", "--model", str(self.theirs), "--seq-length", "16"],
        }[self.program.command]

    @property
    def is_harmless(self) -> bool:
        """True if no change may change the result."""
        return all(change.name.startswith("harmless") or change.name in NOT_REFUSED for change in self.program.changes)

    def _apply(self, draft: Draft, change: Change) -> None:
        """Change the files before they are written."""
        part, name, detail, place = change
        if name.startswith("harmless"):
            _harmless(draft, part, name.removeprefix("harmless "), self.program.family)
        elif part == "config":
            change_config(draft, name, detail, place)
        elif part.startswith("bytes"):
            file = CONFIG if part.endswith("config") else INDEX
            if file == INDEX and draft.index is None:
                draft.split()
            draft.edit(file, change_bytes(name, detail, place))
        elif part == "header":
            change_header(draft, name, detail, place)
        elif part == "tensor":
            change_tensor(draft, name, detail, place)
        elif part == "index":
            change_index(draft, name, detail, place, str(self.root / "outside"))
        elif name in ("a folder as shard", "a folder as index", "no shard") and draft.index is None:
            draft.split()

    def _move(self, name: str) -> None:
        """Remove, replace or add files."""
        output = self.ours if self.program.command == "import" else self.again
        shards = sorted(self.theirs.glob("*.safetensors"))
        weights = sorted(self.ours.glob("*.safetensors")) if self.program.command == "export" else shards
        if name in ("no folder", "a file as folder"):
            folder = self.ours if self.program.command == "export" else self.theirs
            shutil.rmtree(folder)
            if name == "a file as folder":
                folder.write_text("{}")
        elif name in ("no weights", "no shard"):
            for path in weights if name == "no weights" else weights[:1]:
                path.unlink()
        elif name == "output is the folder":
            self.again = self.changed
        elif name == "output in the folder":
            self.ours = self.theirs / "ours"
        elif name in ("output is a file", "output in a file"):
            output.write_text("{}")
            if name == "output in a file":
                self.ours, self.again = (path / "x" if path == output else path for path in (self.ours, self.again))
        elif name.startswith("output has") or name == "source is a file":
            _fill(output, name)
        else:
            file = {"config.json": CONFIG, "index": INDEX, "tokenizer": "tokenizer.json"}
            word = name.rpartition(" ")[2]
            path = weights[0] if word in ("shard", "weights") else self.changed / file[word]
            path.unlink(missing_ok=True)
            if name.startswith("a folder"):
                path.mkdir()

    def check_others(self, before: dict[str, bytes]) -> None:
        """Compare the files that the command may not change."""
        after = _snapshot(self.root)
        output = self.ours if self.program.command == "import" else self.again
        lost = {
            name for name, content in before.items() if after.get(name) != content and self.program.command != "plan"
        }
        if lost:
            raise Wrong(f"files are changed: {sorted(lost)}, output {output}")

    def check_result(self, out: str) -> None:
        """Compare what was accepted with what transformers reads."""
        if any(change.part == "place" and change.name not in NOT_REFUSED for change in self.program.changes):
            raise Wrong(f"an impossible folder is accepted: {out!r}")
        command = self.program.command
        if command == "import":
            self._check_parameters()
        if self.is_harmless and command != "export":
            return
        if command == "import":
            code, _, err = _run(["export", str(self.ours), str(self.again)])
            if code:
                raise Wrong(f"imported, but not exported: {err!r}")
        try:
            if command != "export":
                _same_settings(None, self.theirs)
            if command != "plan":
                _same_settings(recorded_model(read_checkpoint(self.ours).settings), self.again)
                self._check_weights()
        except _NotLoadedError as error:
            is_unused = changed_keys(self.plain.config, _read_json(self.changed)) & unused_keys(self.program.family)
            if not is_unused and not any(text in str(error) for text in NEEDLESS):
                raise

    def _check_parameters(self) -> None:
        """Compare the imported parameters with those of the unchanged folder, if its model and weights are the same."""
        _check_files(self.theirs)
        read = _read_json(self.theirs)
        is_same = settings_of(find_family(read), read) == self.plain.settings
        if self.is_harmless or (is_same and {change.part for change in self.program.changes} <= {"config", "place"}):
            found = read_checkpoint(self.ours).arrays
            for name, array in self.plain.arrays.items():
                if not np.array_equal(found[name], array) or found[name].dtype != array.dtype:
                    raise Wrong(f"{name} differs from that of the unchanged folder")

    def _check_weights(self) -> None:
        """Compare the weights that transformers reads from the folder and from the export."""
        first, second = _state(self.theirs), _state(self.again)
        if first.keys() != second.keys():
            raise Wrong(f"transformers reads other tensors: {sorted(first.keys() ^ second.keys())[:5]}")
        for name, tensor in first.items():
            if not torch.equal(tensor, second[name]):
                raise Wrong(f"transformers reads another {name} from the export than from the folder")


def _harmless(draft: Draft, part: str, name: str, family: str) -> None:
    """Change files without changing their meaning."""
    if name == "order" and part == "config":
        draft.config = dict(reversed(draft.config.items()))
    elif name == "one line":
        draft.indent = None
    elif name == "more keys":
        draft.config |= {"torch_dtype": "float16", "_name_or_path": "x", "use_cache": False, "bos_token_id": 7}
    elif part == "config" and name != "nothing":
        draft.edit(CONFIG, change_bytes(name, "", 0.0))
    elif name == "order":
        for file, header in draft.headers.items():
            draft.headers[file] = dict(reversed(header.items()))
    elif name == "metadata":
        for header in draft.headers.values():
            header["__metadata__"] = {"format": "pt", "more": "é"}
    elif name == "shards" and draft.index is None and draft.headers:
        draft.split()
    elif name == "mtp" and family.startswith("qwen") and draft.headers:
        draft.add(min(draft.headers), "mtp.norm.weight", "F32", [3], bytes(12))
    elif name == "names" and draft.headers:
        for header in draft.headers.values():
            for each in [*header]:
                header[_other_name(each, family)] = header.pop(each)


def _other_name(name: str, family: str) -> str:
    """Return the name that files of Kimi Linear may have in place of the written one."""
    return name.replace("block_sparse_moe", "mlp") if family == "kimi_linear" else name


def _fill(output: Path, name: str) -> None:
    """Put files into the output folder of a command."""
    output.mkdir(parents=True)
    files = {
        "output has a checkpoint": "step_00000003.safetensors",
        "output has metrics": "metrics.jsonl",
        "source is a file": "source",
        "output has config.json": CONFIG,
        "output has weights": SINGLE,
        "output has an index": INDEX,
        "output has files": "notes.txt",
    }
    if name in files:
        (output / files[name]).write_text("{}")
    else:
        (output / "step_00000000.safetensors").mkdir()
        (output / "step_00000000.safetensors" / "notes.txt").write_text("{}")


def _read_json(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text(encoding="utf-8-sig"))


def _same_settings(ours: TransformerConfig | None, folder: Path) -> None:
    """Compare the settings of a model, or those read from a folder, with those that transformers reads."""
    read = _read_json(folder)
    found = settings_of(find_family(read), read)
    if ours is not None:
        recorded = {name: getattr(ours, name) for name in found}
        if recorded != found:
            raise Wrong(f"exported settings differ: {_differences(recorded, found)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = copy.deepcopy(transformers.AutoConfig.from_pretrained(folder)).to_dict()
    except Exception as error:
        raise _NotLoadedError(
            f"transformers refuses what is accepted: {type(error).__name__}: {error!s:.500}"
        ) from error
    expected = settings_of(find_family(theirs), theirs)
    if expected != found:
        raise Wrong(f"transformers reads other settings: {_differences(expected, found)}")


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> str:
    differing = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    return ", ".join(f"{name}: expected {expected.get(name)!r}, got {found.get(name)!r}" for name in differing)


def _check_files(folder: Path) -> None:
    """Open every file of weights with the package safetensors."""
    for path in folder.glob("*.safetensors"):
        if path.is_file() and path.name != "step_00000000.safetensors":
            try:
                with safetensors.safe_open(path, "np"):
                    pass
            except Exception as error:
                raise Wrong(f"safetensors refuses {path.name}, which is accepted: {error}") from error


def _state(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that transformers reads, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        except Exception as error:
            raise _NotLoadedError(f"transformers refuses {folder}: {type(error).__name__}: {error!s:.500}") from error
    return model.state_dict()
