"""The files that the fuzzer of files changes: their contents, and forged checkpoints with a right checksum."""

import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from diptych.plans import checkpoint as checkpoints
from diptych.plans.schedule.csv import schedule_to_csv
from diptych.plans.schedule.named import build_schedule
from reference_torch.train import Trainer
from tests.backends import tiny_corpus
from tests.saving.support import CONFIG, TRAIN

TOML = """hidden_size = 16
lr = 0.002
no-mhc = [1, 2]
[data]
data_path = "text \\u00e9"
reset_attention_mask = true
[data.more]
seed = 0x10
"""
TOML_FLAGS = ["--hidden-size", "16", "--lr", "0.002", "--no-mhc", "1", "2", "--data-path", "text é"]
TOML_FLAGS += ["--reset-attention-mask", "--seed", "16"]
TOML_LINES = {
    "the same setting in another table": "[again]\nlr = 0.5",
    "the same setting twice": "seed = 3",
    "the same setting with another hyphen": "[again]\nhidden-size = 8",
    "nested arrays": "deep = " + "[" * 5000 + "]" * 5000,
    "nested tables": "deep = " + "{a = " * 5000 + "1" + "}" * 5000,
    "a dotted key of 5000 parts": ".".join(["a"] * 5000) + " = 1",
    "5000 hexadecimal digits": "long = 0x1" + "0" * 5000,
    "5000 digits": "long = 1" + "0" * 5000,
    "a date": "date = 2026-01-01",
    "inf": "rate = inf",
    "an empty name": '"" = 1',
    "a name with a blank": '"a b" = 1',
    "a list of lists": "lists = [[1], [2]]",
    "an empty list": "none = []",
    "a long text": 'text = "' + "x" * 10**6 + '"',
    "a text of two lines": 'text = """a\nb"""',
}
"""Lines that are inserted into the TOML file, by name."""
COSTS: dict[str, Any] = {
    "forward_seconds": [0.011, 0.010],
    "input_gradient_seconds": [0.013, 0],
    "weight_gradient_seconds": [0.009, 1],
    "communication_seconds": 0.0004,
    "activation_bytes": [1000000, 900000],
    "weight_gradient_bytes": [500000, 0],
    "about": {"machine": "é"},
}
METRICS = [{"backend": "torch", "step": step, "loss": 2.5 - step, "grad_norm": 1e-3} for step in range(5)]
METRICS += [{"backend": "jax", "step": 5, "validation_loss": 1.0}]
ODD: dict[str, Any] = {
    "null": None,
    "true": True,
    "-1": -1,
    "0": 0,
    "1e308": 1e308,
    "5e-324": 5e-324,
    "401 digits": 10**400,
    "NaN": math.nan,
    "Infinity": math.inf,
    "text": "1",
    "empty": "",
    "list": [],
    "object": {},
    "long": "x" * 10**6,
    "surrogate": "\ud800",
}
"""JSON values of unexpected types."""


def schedule_text() -> str:
    """Return a schedule of three ranks."""
    return schedule_to_csv(build_schedule("zb-h1", 3, 4))


@functools.cache
def checkpoint_bytes() -> bytes:
    """Return a checkpoint of a small model after two steps."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(CONFIG, TRAIN, tiny_corpus())
        for step in range(2):
            trainer.train_step(step)
        return trainer.save(Path(folder)).read_bytes()


def _record(content: bytes) -> dict[str, Any]:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"][checkpoints.RECORD])


def _setting(part: str, name: str, value: Any):
    def change(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        record["settings"][part][name] = value

    return change


def _entry(name: str, value: Any):
    def change(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        record[name] = value

    return change


def _missing(name: str):
    def change(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        del record[name]

    return change


def _array(prefix: str, made):
    """Change the first array under a prefix."""

    def change(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        name = min(name for name in arrays if name.startswith(prefix))
        arrays[name] = made(arrays[name])

    return change


def _surplus(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    arrays["model.surplus"] = np.zeros(3)


def _fewer(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    del arrays[min(arrays)]


def _nothing(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    pass


def _filled(value: float):
    return lambda array: np.full_like(array, value)


IMPOSSIBLE = {
    **{f"format {value!r}": _entry("format", value) for value in (0, -1, math.nan, None, True, "1", 1.5, [1], 10**20)},
    **{f"step {value!r}": _entry("step", value) for value in (True, -1, 1.5, "3", None, math.nan, 21, 10**12)},
    **{f"settings {value!r}": _entry("settings", value) for value in (None, [], "x", {}, {"model": {}})},
    **{f"no {name}": _missing(name) for name in ("format", "step", "settings")},
    **{
        f"num_layers {value!r}": _setting("model", "num_layers", value)
        for value in (10**7, 0, -1, "2", 2.5, None, True, math.nan, 3)
    },
    **{f"hidden_size {value!r}": _setting("model", "hidden_size", value) for value in (10**9, 0, 15, "16", [16])},
    **{f"vocab_size {value!r}": _setting("model", "vocab_size", value) for value in (2**40, 257, -5)},
    **{f"params_dtype {value!r}": _setting("model", "params_dtype", value) for value in ("int8", "float32", None, 3)},
    **{f"layer_pattern {value!r}": _setting("model", "layer_pattern", value) for value in ("mamba", "", 7, "kda")},
    **{
        f"weights {kind}": _array("model.", lambda x, kind=kind: x.astype(kind))
        for kind in ("int32", "bool", "float16")
    },
    **{f"corpus_digest {value!r}": _setting("data", "corpus_digest", value) for value in ("", "x" * 16, None, 3)},
    **{f"data_seed {value!r}": _setting("data", "data_seed", value) for value in (-1, 2**32, True, "0")},
    **{f"training_bytes {value!r}": _setting("data", "training_bytes", value) for value in (0, -1, 0.5, None)},
    **{f"lr {value!r}": _setting("train", "lr", value) for value in (-1.0, math.inf, "1", [[1]], 10**400)},
    "an unknown setting": _setting("model", "hiden_size", 8),
    "a nested setting": _setting("model", "recompute_modules", [["mlp"]]),
    "a surplus entry": _entry("more", 1),
    "weights of another shape": _array("model.", lambda x: np.concatenate([x, x])),
    "weights without shape": _array("model.", lambda x: np.zeros((), x.dtype)),
    "NaN in weights": _array("model.", _filled(math.nan)),
    "inf in weights": _array("model.", _filled(math.inf)),
    "NaN in moments": _array("first_moment.", _filled(math.nan)),
    "NaN in second moments": _array("second_moment.", _filled(math.nan)),
    "negative second moments": _array("second_moment.", _filled(-1.0)),
    "a run as weights alone": _entry("format", 2),
    "surplus array": _surplus,
    "array missing": _fewer,
}
"""Changes that make a checkpoint invalid, by name."""
POSSIBLE = {
    "nothing": _nothing,
    "another step": _entry("step", 7),
    "other weights": _array("model.", lambda x: x + 1.0),
    "weights of 0": _array("model.", np.zeros_like),
    "another rate": _setting("train", "lr", 0.5),
}
"""Changes after which the checkpoint is a different, valid one."""
RAW = ("deep record", "record is a list", "record is no JSON", "no record", "checksum missing", "checksum a list")
RAW += ("checksum of another", "header of 2**60 bytes", "record of 4,301 digits", "settings twice")
"""Forgeries of a file's header."""


def forged(name: str) -> bytes:
    """Return a checkpoint changed as named, with a checksum that is right where it can be."""
    content = checkpoint_bytes()
    arrays = load(content)
    record = _record(content)
    if name in RAW:
        if name == "header of 2**60 bytes":
            return (2**60).to_bytes(8, "little") + content[8:]
        return save(arrays, _raw_metadata(name, record))
    change = {**IMPOSSIBLE, **POSSIBLE}[name]
    del record["checksum"]
    change(record, arrays)
    record["checksum"] = checkpoints._checksum(record, sorted(arrays), arrays.__getitem__)
    return save(arrays, {checkpoints.RECORD: json.dumps(record)})


def _raw_metadata(name: str, record: dict[str, Any]) -> dict[str, str] | None:
    if name == "no record":
        return None
    if name == "checksum missing":
        del record["checksum"]
    changes = {"checksum a list": ["checksum"], "checksum of another": "0" * 64}
    if name in changes:
        record["checksum"] = changes[name]
    texts = {
        "deep record": "[" * 10**5 + "]" * 10**5,
        "record is a list": "[1, 2]",
        "record is no JSON": "{",
        "record of 4,301 digits": "1" * 4301,
        "settings twice": json.dumps(record)[:-1] + ', "settings": {"model": {}}}',
    }
    return {checkpoints.RECORD: texts.get(name, json.dumps(record))}
