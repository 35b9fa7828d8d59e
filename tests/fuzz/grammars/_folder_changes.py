"""The Hugging Face folders that the fuzzer of folders changes, and the changes of their files, by name."""

import copy
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from diptych.plans.checkpoint import read_checkpoint
from diptych.plans.families import FAMILIES
from diptych.plans.families.family import COMMON_KEYS, OWN_KEYS, settings_of
from diptych.plans.families.folder import CONFIG, INDEX, SINGLE, import_folder
from diptych.plans.families.kimi import OTHER_KEYS
from tests.families import models
from tests.fuzz.grammars._file_contents import ODD

TYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DEEP = "[" * 10**5 + "]" * 10**5


class Draft:
    """The files of a folder before they are written: values, which become bytes, and changes of these bytes."""

    def __init__(self, config: dict[str, Any], headers: dict[str, Any], payloads: dict[str, bytes]) -> None:
        self.config = copy.deepcopy(config)
        self.headers = copy.deepcopy(headers)
        self.payloads = dict(payloads)
        self.index: Any = None
        self.indent: int | None = 2
        self.edits: dict[str, list[Callable[[bytes], bytes]]] = {}

    def edit(self, name: str, change: Callable[[bytes], bytes]) -> None:
        """Change the bytes of a file after all other changes."""
        self.edits.setdefault(name, []).append(change)

    def split(self) -> None:
        """Divide the weights into two shards with an index, alternating their tensors."""
        header, payload = self.headers.pop(SINGLE), self.payloads.pop(SINGLE)
        names = sorted(name for name in header if name != "__metadata__")
        for file, part in ((FIRST, names[::2]), (SECOND, names[1::2])):
            self.headers[file], self.payloads[file] = {}, b""
            for name in part:
                begin, end = header[name]["data_offsets"]
                self.add(file, name, header[name]["dtype"], header[name]["shape"], payload[begin:end])
        files = {name: file for file in (FIRST, SECOND) for name in self.headers[file]}
        self.index = {"metadata": {"total_size": len(payload)}, "weight_map": files}

    def add(self, file: str, name: str, dtype: str, shape: list[int], content: bytes) -> None:
        """Append a tensor to a file."""
        begin = len(self.payloads[file])
        self.headers[file][name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(content)]}
        self.payloads[file] += content

    def remove(self, file: str, name: str) -> tuple[str, list[int], bytes]:
        """Remove a tensor and its bytes, and return its type, shape and bytes."""
        header, payload = self.headers[file], self.payloads[file]
        gone = header.pop(name)
        begin, end = gone["data_offsets"]
        for entry in header.values():
            entry["data_offsets"] = [x - (end - begin) * (x >= end) for x in entry["data_offsets"]]
        self.payloads[file] = payload[:begin] + payload[end:]
        return gone["dtype"], gone["shape"], payload[begin:end]

    def write(self, folder: Path) -> None:
        """Write all files."""
        folder.mkdir(parents=True)
        files = {CONFIG: json.dumps(self.config, indent=self.indent).encode()}
        for file, header in self.headers.items():
            text = json.dumps(header).encode()
            for change in self.edits.get(f"header of {file}", []):
                text = change(text)
            files[file] = len(text).to_bytes(8, "little") + text + self.payloads[file]
        if self.index is not None:
            files[INDEX] = json.dumps(self.index).encode()
        for name, content in files.items():
            for change in self.edits.get(name, []):
                content = change(content)
            (folder / name).write_bytes(content)


class Base(NamedTuple):
    """A valid folder of a family."""

    config: dict[str, Any]
    header: dict[str, Any]
    payload: bytes
    settings: dict[str, Any]
    """Its settings of TransformerConfig."""
    arrays: dict[str, np.ndarray]
    """The parameters of its import, by name in the checkpoint."""

    def draft(self) -> Draft:
        """Return its files, to be changed."""
        return Draft(self.config, {SINGLE: self.header}, {SINGLE: self.payload})


@functools.cache
def base(family: str, dtype: str, tied: bool) -> Base:
    """Save a tiny model of a family in a type, and import it."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        more = {"tie_word_embeddings": True} if tied else {}
        models.save(models.build(family, **more), root / "theirs", TYPES[dtype])
        content = (root / "theirs" / SINGLE).read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        config = json.loads((root / "theirs" / CONFIG).read_text())
        arrays = read_checkpoint(import_folder(root / "theirs", root / "ours").checkpoint).arrays
        settings = settings_of(models.family_of(family), config)
        header = {name: entry for name, entry in json.loads(content[8:begin]).items() if name != "__metadata__"}
        return Base(config, header, content[begin:], settings, arrays)


def pick(among: Any, place: float) -> Any:
    """Return an entry by its position as a share of all."""
    return among[int(place * len(among))]


def tensor_at(draft: Draft, place: float) -> tuple[str, str]:
    """Return the file and the name of the tensor at a position."""
    found = [(file, name) for file, header in sorted(draft.headers.items()) for name in sorted(header)]
    return pick(found, place)


def unused_keys(family: str) -> frozenset[str]:
    """Return the keys with which a family's models do not compute; transformers checks their types all the same."""
    has_experts = family in ("qwen3_next with experts", "kimi_linear")
    keys = COMMON_KEYS | models.family_of(family).ignored_keys | {"initializer_range"}
    return keys if has_experts else keys | EXPERT_KEYS


EXPERT_KEYS = {setting.theirs for family in FAMILIES.values() if family.experts for setting in family.experts.settings}
"""Keys that only mixtures of experts read."""
KEYS = sorted(
    {setting.theirs for family in FAMILIES.values() for setting in family.settings}
    | EXPERT_KEYS
    | {required.theirs for family in FAMILIES.values() for required in family.required}
    | {*OWN_KEYS, *OTHER_KEYS}
    | {"first_k_dense_replace", "mlp_layer_types", "mlp_only_layers", "decoder_sparse_step", "linear_attn_config"}
    | {"full_attention_interval", "rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters"}
    | {"num_shared_experts", "quantization_config", "sliding_window", "model_type", "architectures", "dtype"}
)
"""Keys that families read, refuse or rename; nested ones with dots."""
OLD_KEYS = ("rope_theta", "partial_rotary_factor", "rope_scaling", "full_attention_interval", *OTHER_KEYS)
"""Keys that stand for others."""
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "as float": float,
    "as text": str,
    "negated": lambda x: -x,
    "plus 1": lambda x: x + 1,
    "doubled": lambda x: 2 * x,
    "halved": lambda x: x // 2 if isinstance(x, int) else x / 2,
    "2**31": lambda x: 2**31,
    "10**9": lambda x: 10**9,
    "2**64": lambda x: 2**64,
    "10**30": lambda x: 10**30,
    "false": lambda x: False,
    "true": lambda x: True,
    "1": lambda x: 1,
    "2": lambda x: 2,
}
"""Values that depend on the present one."""
LISTS: dict[str, Callable[[list], list]] = {
    "shorter": lambda x: x[:-1],
    "longer": lambda x: [*x, *x[:1]],
    "reversed": lambda x: x[::-1],
    "rotated": lambda x: [*x[1:], *x[:1]],
    "null inside": lambda x: [*x[:-1], None],
    "number inside": lambda x: [*x[:-1], 1],
    "list inside": lambda x: [*x[:-1], [*x]],
    "unknown inside": lambda x: [*x[:-1], "sliding_attention"],
    "repeated": lambda x: x * 1000,
    "empty": lambda x: [],
}
"""Changes of lists."""


def _get(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def _set(config: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for key in outer:
        if not isinstance(config.get(key), dict):
            config[key] = {}
        config = config[key]
    config[last] = value


def _present(config: Mapping[str, Any]) -> list[str]:
    nested = [f"{key}.{inner}" for key, value in config.items() if isinstance(value, dict) for inner in value]
    return [*sorted(config), *sorted(nested)]


def changed_keys(one: Mapping[str, Any], two: Mapping[str, Any]) -> set[str]:
    """Return the keys whose values differ in two contents of config.json."""
    return {key for key in {**one, **two} if json.dumps(one.get(key)) != json.dumps(two.get(key))}


def change_config(draft: Draft, name: str, detail: str, place: float) -> None:
    """Change config.json."""
    config = draft.config
    key = pick(KEYS if name in ("set", "set number", "list") else _present(config), place)
    value = _get(config, key)
    if name == "old key":
        key = pick(OLD_KEYS, place)
        _set(config, key, _old_value(config, key))
    elif name in ("set", "value"):
        _set(config, key, ODD[detail])
    elif name in ("set number", "number"):
        usual = value if isinstance(value, int | float) else 2
        _set(config, key, NUMBERS[detail](usual))
    elif name == "list":
        key = pick([key for key, value in config.items() if isinstance(value, list)] or ["layer_types"], place)
        config[key] = LISTS[detail](config.get(key) or [])
    elif name == "nested":
        _set(config, key, {key: value} if detail == "object" else [value])
    elif name in ("missing", "renamed"):
        outer = _get(config, key.rpartition(".")[0]) if "." in key else config
        last = key.rpartition(".")[2]
        gone = outer.pop(last)
        if name == "renamed":
            outer[{"capitals": last.upper(), "more": f"{last}_", "nested": f"text_config.{last}"}[detail]] = gone
    elif name == "twice":
        extra = f', "{key.rpartition(".")[2]}": {json.dumps(ODD[detail])}}}'.encode()
        draft.edit(CONFIG, lambda content: content.rstrip()[:-1] + extra)


def _old_value(config: Mapping[str, Any], key: str) -> Any:
    """Return a valid value for a key that stands for others; those that a family does not have are odd."""
    usual = {
        "rope_theta": 50.0,
        "partial_rotary_factor": 0.25,
        "rope_scaling": {"type": "default", "rope_theta": 70.0},
        "full_attention_interval": 2,
    }
    return usual[key] if key in usual else config.get(OTHER_KEYS[key], 2)


CONFIG_CHANGES: dict[str, tuple[str, ...]] = {
    "set": (*ODD,),
    "value": (*ODD,),
    "set number": (*NUMBERS,),
    "number": (*NUMBERS,),
    "list": (*LISTS,),
    "nested": ("object", "list"),
    "missing": ("",),
    "renamed": ("capitals", "more", "nested"),
    "twice": (*ODD,),
    "old key": ("",),
}
"""Details by change of config.json."""
TEXTS = {
    "deep": DEEP.encode(),
    "open": b"[" * 10**5,
    "digits": b"1" * 5000,
    "no UTF-8": b"\xff\xfe\x80",
    "NaN": b"NaN",
    "zero byte": b"\0",
    "comma": b",",
}


def change_bytes(name: str, detail: str, place: float) -> Callable[[bytes], bytes]:
    """Return a change of the bytes of a text file."""

    def change(content: bytes) -> bytes:
        cut = int(place * len(content))
        if name == "insert":
            return content[:cut] + TEXTS[detail] + content[cut:]
        whole = {
            "cut": content[:cut],
            "flip": content[:cut] + bytes([content[cut] ^ 1 << int(place * 997) % 8]) + content[cut + 1 :],
            "empty": b"",
            "UTF-16": content.decode().encode("utf-16"),
            "byte order mark": b"\xef\xbb\xbf" + content,
            "line ends": content.replace(b"\n", b"\r\n") + b"\r\n",
            "replaced": json.dumps(ODD.get(detail)).encode(),
            "deep value": b'{"a": ' + DEEP.encode() + b"}",
        }
        return whole[name]

    return change


BYTES: dict[str, tuple[str, ...]] = {
    "insert": (*TEXTS,),
    "replaced": (*ODD,),
    **dict.fromkeys(("cut", "flip", "empty", "UTF-16", "deep value"), ("",)),
}
"""Details by change of a text file's bytes."""
