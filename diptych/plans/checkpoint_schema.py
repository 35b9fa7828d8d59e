"""The schema of a checkpoint: its record and arrays, validated before an array is read.

The record is JSON of this form; ``format`` counts versions of it.

    {"format": 1, "step": 100, "checksum": "<64 hexadecimal digits>",
     "settings": {"model": {...}, "train": {...}, "data": {"corpus_digest": "<16>", "data_seed": 0, ...}}}

``model`` and ``train`` are valid settings of TransformerConfig and TrainConfig. Every parameter of the model has three
arrays, in its ``params_dtype``. Format 2 has weights alone: its settings are those of the model, its step is 0, and
every parameter has one array.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.text_files import one_line, parse_json

RUN_FORMAT = 1
WEIGHTS_FORMAT = 2
FORMATS = (RUN_FORMAT, WEIGHTS_FORMAT)
MODEL = "model."
FIRST_MOMENT = "first_moment."
SECOND_MOMENT = "second_moment."
"""Prefixes of arrays, each before a parameter's canonical name."""
LONGEST_RECORD = 1_000_000
"""Maximum number of characters of a record; a typical record has about 2,000."""
FILE_TYPES = {"float32": "F32", "float64": "F64"}
"""Type names in safetensors, by parameter type."""

_EXECUTION = frozenset(
    {
        "impl",
        "microbatch_group_size_per_vp_stage",
        "overlap_p2p_comm",
        "variable_seq_lengths",
        "context_parallel_size",
        "cp_exchange",
        "cp_wire_dtype",
        "cp_attention_layout",
        "tensor_model_parallel_size",
        "sequence_parallel",
        "use_distributed_optimizer",
    }
)

_TRAINING = frozenset(
    {
        *("seq_length", "hidden_dropout", "moe_aux_loss_coeff", "init_method_std", "params_dtype", "bf16", "seed"),
        *("fp8", "fp8_recipe", "fp8_amax_history_len"),
        *("activation_storage", "activation_storage_layers"),
        *("use_flash_attn", "calculate_per_token_loss"),
    }
)
"""Settings of a run that may differ from those with which the weights were made."""


class SchemaError(ValueError):
    """An error for an invalid record or array; the message names it and the expected value."""


class StoredArray(NamedTuple):
    """Shape and type of an array in a file, known before it is read."""

    shape: tuple[int, ...]
    type: str
    """Name of the type in safetensors."""


def decides_steps(name: str) -> bool:
    """Return True if a setting of the model determines the result of a step, not only its execution."""
    return name not in _EXECUTION and not any(part in name for part in ("recompute", "pipeline", "offload"))


def defines_model(name: str) -> bool:
    """Return True if a setting determines what a model computes from its parameters, without dropout."""
    return decides_steps(name) and name not in _TRAINING


def recorded_model(settings: Mapping[str, Any]) -> TransformerConfig:
    """Return the configuration of a record's model on one rank.

    Raises:
        ValueError: a setting is invalid.
        TypeError: a setting is unknown or missing.
    """
    return TransformerConfig(**{name: value for name, value in settings["model"].items() if decides_steps(name)})


def parse_record(text: Any) -> dict[str, Any]:
    """Parse the JSON of a record.

    Raises:
        SchemaError: the text is not a JSON object, repeats a key, or is too long or too deeply nested.
    """
    if not isinstance(text, str):
        raise SchemaError("no record")
    if len(text) > LONGEST_RECORD:
        raise SchemaError(f"a record of {len(text):,} characters, more than {LONGEST_RECORD:,}")
    try:
        record = parse_json(text)
    except ValueError as error:
        raise SchemaError(f"a record that is no JSON ({one_line(error)})") from None
    if not isinstance(record, dict):
        raise SchemaError(f"a record that is no JSON object but {one_line(record)}")
    return record


def check_record(record: Mapping[str, Any], arrays: Mapping[str, StoredArray]) -> None:
    """Reject a record that violates the schema, or arrays that do not match its model.

    Args:
        record: result of parse_record.
        arrays: shapes and types of the arrays in the file, by name.

    Raises:
        SchemaError: an entry or array is invalid; the message names it.
    """
    _check_keys("record", record, {"format", "step", "settings", "checksum"})
    version, step, settings, checksum = (record[name] for name in ("format", "step", "settings", "checksum"))
    if not _is_integer(version) or version not in FORMATS:
        raise SchemaError(f"format {one_line(version)}, where one of {', '.join(map(str, FORMATS))} was expected")
    if not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{64}", checksum):
        raise SchemaError(f"checksum {one_line(checksum)}, where 64 hexadecimal digits were expected")
    is_run = version == RUN_FORMAT
    _check_keys("settings", settings, {"model", "train", "data"} if is_run else {"model"})
    for part, values in settings.items():
        if not isinstance(values, dict):
            raise SchemaError(f"settings of {part} that are no JSON object but {one_line(values)}")
        for name, value in values.items():
            if not all(isinstance(item, str | int | float | None) for item in _items(value)):
                raise SchemaError(f"{name} {one_line(value)}, where text, a number, true, false or null was expected")
    last = 0
    if is_run:
        _check_data(settings["data"])
        last = _construct("train", lambda: TrainConfig(**settings["train"])).train_iters
    if not _is_integer(step) or not 0 <= step <= last:
        of = f"train_iters={last}" if is_run else "0 of weights alone"
        raise SchemaError(f"step {one_line(step)}, where one from 0 to {of} was expected")
    layers = settings["model"].get("num_layers")
    if not _is_integer(layers) or layers > len(arrays):  # before anything is done a layer at a time
        raise SchemaError(f"num_layers {one_line(layers)}, with {len(arrays)} arrays in all")
    prefixes = (MODEL, FIRST_MOMENT, SECOND_MOMENT) if is_run else (MODEL,)
    _check_arrays(_construct("model", lambda: recorded_model(settings)), arrays, prefixes)


def check_numbers(arrays: Mapping[str, np.ndarray]) -> None:
    """Reject arrays with NaN or infinite elements, and negative second moments.

    Raises:
        SchemaError: an array is invalid; the message names it.
    """
    for name, array in arrays.items():
        finite = np.isfinite(array)
        if not finite.all():
            raise SchemaError(f"{array[~finite][0]} in {name}, where finite numbers were expected")
        if name.startswith(SECOND_MOMENT) and (array < 0.0).any():
            raise SchemaError(f"{array[array < 0.0][0]} in {name}, where numbers of at least 0 were expected")


def _check_data(data: Mapping[str, Any]) -> None:
    """Reject invalid settings of the data."""
    # Earlier versions did not record training_bytes.
    _check_keys("settings of data", data, {"corpus_digest", "data_seed"}, ("reset_attention_mask", "training_bytes"))
    digest = data["corpus_digest"]
    seed = data["data_seed"]
    for name, right in (
        ("corpus_digest", isinstance(digest, str) and re.fullmatch("[0-9a-f]{16}", digest) is not None),
        ("data_seed", _is_integer(seed) and 0 <= seed < 2**32),
        ("reset_attention_mask", data.get("reset_attention_mask", True) is True),
        ("training_bytes", _is_integer(data.get("training_bytes", 1)) and data.get("training_bytes", 1) > 0),
    ):
        if not right:
            raise SchemaError(f"{name} {one_line(data[name])}, which no corpus has")


def _check_arrays(model: TransformerConfig, arrays: Mapping[str, StoredArray], prefixes: tuple[str, ...]) -> None:
    """Reject missing or surplus arrays, and arrays of another shape or type than the model's."""
    specs = parameter_specs(model)
    expected = {prefix + name: spec.shape for prefix in prefixes for name, spec in specs.items()}
    for names, what in ((expected.keys() - arrays.keys(), "no"), (arrays.keys() - expected.keys(), "a surplus")):
        if names:
            raise SchemaError(f"{what} array {min(names)[:100]!r}")
    for name, shape in expected.items():
        wanted = StoredArray(shape, FILE_TYPES[model.params_dtype])
        if arrays[name] != wanted:
            found = f"{arrays[name].type} {list(arrays[name].shape)}"
            raise SchemaError(f"{found} in {name}, where {wanted.type} {list(shape)} was expected")


def _construct(part: str, make: Callable[[], Any]) -> Any:
    """Return a configuration from recorded settings, with every error turned into a SchemaError."""
    try:
        return make()
    except Exception as error:  # rules meet values of any JSON type here
        raise SchemaError(f"settings of {part} that none can have ({one_line(error)})") from None


def _check_keys(what: str, found: Any, needed: set[str], allowed: Collection[str] = ()) -> None:
    if not isinstance(found, dict):
        raise SchemaError(f"{what} that is no JSON object but {one_line(found)}")
    if missing := sorted(needed - found.keys()):
        raise SchemaError(f"{what} without {missing[0]!r}")
    if unknown := sorted(found.keys() - needed - {*allowed}):
        raise SchemaError(f"{what} with a surplus {one_line(unknown[0])}")


def _items(value: Any) -> list[Any]:
    """Return the items of a list, or any other value as the only item."""
    return value if isinstance(value, list) else [value]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
