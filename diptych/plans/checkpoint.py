"""Checkpoints: one file per step, written atomically, readable by both backends.

A checkpoint is a safetensors file ``step_00000100.safetensors`` with the arrays

    model.<name>, first_moment.<name>, second_moment.<name>      <name>: canonical parameter name

and, in its header, one JSON record: format version, step, settings of model, training and data, and a checksum over
arrays and record. No other training position is stored, because batches, dropout masks and the learning rate depend on
the step only. Any safetensors reader can read the weights.

A file with weights alone (write_weights) has the first kind of arrays, and the record of the model. A run begins with
them (``diptych train --init``).

A file is written under a temporary name, flushed to disk, and then renamed, so that the last complete checkpoint
survives when a process is killed.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as encode

from diptych.plans.amax_history import is_history
from diptych.plans.checkpoint_schema import (
    FILE_TYPES,
    FIRST_MOMENT,
    FORMATS,
    MODEL,
    RUN_FORMAT,
    SECOND_MOMENT,
    WEIGHTS_FORMAT,
    SchemaError,
    StoredArray,
    check_numbers,
    check_record,
    decides_steps,
    defines_model,
    parse_record,
    recorded_model,
)
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.model.data import Corpus
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.tensor_files import TensorFile, TensorFileError, TensorInfo, write_tensors

__all__ = ["FIRST_MOMENT", "MODEL", "SECOND_MOMENT", "recorded_model"]
RECORD = "diptych"
"""Key of the JSON record in the file's header."""
METRICS = "metrics.jsonl"
"""Name of the file with a run's metrics, in the folder of its checkpoints."""


_DEFAULTS = {
    part: {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    for part, kind in (("model", TransformerConfig), ("train", TrainConfig))
}
"""Values of settings that a checkpoint of an earlier version does not record."""


class CheckpointError(ValueError):
    """An error for a checkpoint that cannot be written, read or used."""


class Checkpoint(NamedTuple):
    """The state of a training run between two steps."""

    step: int
    """Number of optimizer steps taken, which is the number of the next step."""
    arrays: dict[str, np.ndarray]
    """Parameters and both moments of AdamW, by prefixed canonical name."""
    settings: dict[str, Any]
    """Settings of the run, under the keys ``model``, ``train`` and ``data``; of weights alone, only ``model``."""
    checksum: str = ""
    """Checksum over arrays and record; only in a checkpoint that was read."""

    @property
    def is_run(self) -> bool:
        """True if a run can continue from it; False for weights alone."""
        return "train" in self.settings


def run_settings(model: TransformerConfig, train: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """Return the settings that a checkpoint records: those that determine the result of a step.

    Recompute and partition settings affect memory and time only, and impl also affects rounding. They may change when a
    run is resumed.
    """
    packed = {} if corpus.training_documents is None else {"reset_attention_mask": True}
    return {
        "model": {name: value for name, value in asdict(model).items() if decides_steps(name)},
        "train": asdict(train),
        "data": {
            "corpus_digest": corpus.digest,
            "training_bytes": len(corpus.training),  # the digest covers the concatenated splits, not their boundary
            "data_seed": corpus.seed,
        }
        | packed,
    }


def write_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write a checkpoint and remove all but the newest ``keep``.

    Args:
        folder: folder of the run's checkpoints; created if it does not exist.
        checkpoint: the state to write.
        keep: number of checkpoints that remain in the folder, including this one.

    Returns:
        The path of the checkpoint.

    Raises:
        ValueError: ``keep`` is below 1.
        CheckpointError: the folder is not writable or has a checkpoint of a later step, the disk is full, an element
            is not finite, or a second moment is negative. Earlier checkpoints remain.
    """
    if keep < 1:
        raise ValueError(f"keep: expected at least 1, got {keep}")
    _check_latest(folder, checkpoint.step)
    path = folder / f"step_{checkpoint.step:08d}.safetensors"
    partial = folder / f".{path.name}.{os.getpid()}.partial"
    record = {"format": RUN_FORMAT, "step": checkpoint.step, "settings": checkpoint.settings}
    record["checksum"] = _checksum(record, sorted(checkpoint.arrays), checkpoint.arrays.__getitem__)
    untouched = "earlier checkpoints are untouched"
    try:
        check_numbers(checkpoint.arrays)
    except SchemaError as error:
        raise CheckpointError(
            f"checkpoint: expected to write step {checkpoint.step}, got {error}; {untouched}"
        ) from None
    content = encode(checkpoint.arrays, {RECORD: json.dumps(record)})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".step_*.partial"):
            if stale.is_file():
                stale.unlink(missing_ok=True)
        _write_through(partial, content)
        os.replace(partial, path)
        _flush_folder(folder)
        for old in list_checkpoints(folder)[:-keep]:
            old.unlink(missing_ok=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise CheckpointError(
            f"checkpoint: expected to write {len(content):,} bytes to {path}, got {error.strerror or error}; "
            f"{untouched}"
        ) from None
    return path


def write_weights(folder: Path, model: TransformerConfig, read: Callable[[str], np.ndarray]) -> Path:
    """Write a checkpoint of weights alone, one parameter at a time.

    Args:
        folder: folder of the checkpoint; created if it does not exist.
        model: configuration of the model.
        read: returns a parameter by canonical name, in params_dtype.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: the folder has checkpoints or metrics, or is not writable, the disk is full, or an element is
            not finite.
    """
    check_unused(folder)
    path = folder / f"step_{0:08d}.safetensors"
    settings = {"model": {name: value for name, value in asdict(model).items() if decides_steps(name)}}
    record = {"format": WEIGHTS_FORMAT, "step": 0, "settings": settings}
    specs = parameter_specs(model)
    tensors = {MODEL + name: TensorInfo(FILE_TYPES[model.params_dtype], specs[name].shape) for name in sorted(specs)}
    digest = _Checksum(record)

    def checked(name: str) -> np.ndarray:
        array = read(name.removeprefix(MODEL))
        check_numbers({name: array})
        digest.add(name, array)
        return array

    def recorded(checksum: str) -> dict[str, str]:
        return {RECORD: json.dumps(record | {"checksum": checksum})}

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, checked, lambda: recorded(digest.digits), recorded("0" * len(digest.digits)))
        _flush_folder(folder)
    except SchemaError as error:
        raise CheckpointError(f"checkpoint: expected to write weights, got {error}") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint: expected to write {path}, got {error.strerror or error}") from None
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the folder's checkpoints, sorted by step."""
    found = [path for path in folder.glob("step_*.safetensors") if _step_of(path) is not None and path.is_file()]
    return sorted(found, key=lambda path: (_step_of(path), path.name))


def check_unused(folder: Path, overwrites_metrics: bool = False) -> None:
    """Reject a folder in which a new run would overwrite the files of an earlier run.

    Args:
        folder: folder for checkpoints and metrics; it may be missing.
        overwrites_metrics: True if metrics without a checkpoint are from an earlier start of this run and may be
            overwritten.

    Raises:
        CheckpointError: the folder has checkpoints or metrics.
    """
    remedy = "give --resume to continue that run, or another folder"
    if found := list_checkpoints(folder):
        raise CheckpointError(f"save: expected a folder without checkpoints for a new run, got {found[-1]}; {remedy}")
    metrics = folder / METRICS
    if metrics.exists() and not overwrites_metrics and not (metrics.is_file() and metrics.stat().st_size == 0):
        raise CheckpointError(
            f"save: expected a folder without metrics for a new run, got {metrics}; remove it or give another folder, "
            "or give --resume-if-saved for a run that was ended before its first checkpoint"
        )


def check_names(folder: Path) -> None:
    """Reject a folder in which an entry that is not a file has the name of a checkpoint.

    Such an entry cannot be replaced by a checkpoint, so the run would lose the steps before its first save.

    Raises:
        CheckpointError: there is such an entry; the message names it.
    """
    for path in folder.glob("step_*.safetensors"):
        if _step_of(path) is not None and not path.is_file():
            raise CheckpointError(
                f"save: expected only files with names like {path}, got another kind of entry; rename it"
            )


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read and verify a checkpoint.

    The record is validated before any array is read, and only arrays of the recorded model are read; see
    diptych.plans.checkpoint_schema.

    Args:
        path: a checkpoint, or a folder, whose newest checkpoint is read.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, violates the schema, or has a later format.
    """
    path = find_checkpoint(path)
    try:
        record, arrays = _read(path)
    except (SafetensorError, SchemaError, OSError) as error:
        raise _damaged(path, error) from None
    checksum = record.pop("checksum")
    if checksum != _checksum(record, sorted(arrays), arrays.__getitem__):
        raise _changed(path)
    try:
        check_numbers(arrays)
    except SchemaError as error:
        raise _damaged(path, error) from None
    return Checkpoint(record["step"], arrays, record["settings"], checksum)


def open_weights(path: Path) -> tuple[TensorFile, TransformerConfig]:
    """Verify a checkpoint and return its arrays, to be read one at a time, and its model on one rank.

    Args:
        path: path of the file.

    Raises:
        CheckpointError: see read_checkpoint.
    """
    try:
        file, record = _open(path)
    except (TensorFileError, SchemaError, OSError) as error:
        raise _damaged(path, error) from None
    checksum = record.pop("checksum")
    if checksum != _checksum(record, sorted(file.tensors), file.read):
        raise _changed(path)
    return file, recorded_model(record["settings"])


def find_checkpoint(path: Path | str) -> Path:
    """Return the path of a checkpoint's file.

    Args:
        path: a checkpoint, or a folder, whose newest checkpoint is found.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if path.is_dir():
        found = list_checkpoints(path)
        if not found:
            remedy = "run diptych import first" if (path / "config.json").is_file() else "save one first"
            raise CheckpointError(f"checkpoint: expected step_*.safetensors in {path}, got none; {remedy}")
        path = found[-1]
    elif not path.exists():
        raise CheckpointError(f"checkpoint: expected a file or folder, got {path}, which does not exist")
    elif not path.is_file():
        raise CheckpointError(f"checkpoint: expected a file or folder, got {path}, which is a device or pipe")
    return path


REMEDY = "remove it to continue from the previous checkpoint"


def _damaged(path: Path, error: Exception) -> CheckpointError:
    got = str(error) if isinstance(error, SchemaError) else repr(error)
    return CheckpointError(f"checkpoint: expected a whole checkpoint in {path}, got {got}; {REMEDY}")


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(f"checkpoint: expected {path} unchanged, got another checksum; {REMEDY}")


def _open(path: Path) -> tuple[TensorFile, dict[str, Any]]:
    """Return a file whose arrays are read on demand, and its valid record."""
    file = TensorFile(path)
    arrays = {name: StoredArray(info.shape, info.dtype) for name, info in file.tensors.items()}
    return file, _record(path, file.metadata.get(RECORD), arrays)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the record and the arrays of a file; the arrays are read only if the record is valid."""
    with safe_open(path, "np") as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        arrays = {name: StoredArray((*x.get_shape(),), x.get_dtype()) for name, x in stored.items()}
        record = _record(path, (file.metadata() or {}).get(RECORD), arrays)
        return record, {name: file.get_tensor(name) for name in stored}


def _record(path: Path, text: str | None, arrays: Mapping[str, StoredArray]) -> dict[str, Any]:
    """Return the valid record of a file with given arrays.

    Raises:
        SchemaError: the record is invalid.
        CheckpointError: a later version wrote it.
    """
    record = parse_record(text)
    version = record.get("format")
    if isinstance(version, int) and version > max(FORMATS):
        raise CheckpointError(
            f"checkpoint: expected format {max(FORMATS)} or earlier in {path}, got {version}; a later version wrote "
            "it, use that one"
        )
    check_record(record, arrays)
    named = _step_of(path)
    if named is not None and named != record["step"]:
        raise SchemaError(f"step {record['step']}, where its name says {named}")
    return record


def _step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint; None if the name is not that of a checkpoint."""
    found = re.fullmatch(r"step_([0-9]{8,})\.safetensors", path.name)
    return None if found is None else int(found[1])


def _check_latest(folder: Path, step: int) -> None:
    """Reject a step if the folder has later ones, because a resumed run would read the latest."""
    found = list_checkpoints(folder)
    if found and (_step_of(found[-1]) or 0) > step:
        raise CheckpointError(
            f"checkpoint: expected no later step than {step} in {folder}, got {found[-1].name}; give another "
            "folder, or remove the checkpoints of later steps"
        )


def read_on_all_ranks(
    path: Path | str, check: Callable[[Checkpoint], None], gather_texts: Callable[[str], Sequence[str]]
) -> Checkpoint:
    """Read a checkpoint on all processes of a run and check that it is the same one.

    Machines may have separate disks under one path, with different newest checkpoints.

    Args:
        path: see read_checkpoint.
        check: rejects a checkpoint that does not fit the run.
        gather_texts: function that gathers one text from every process, in the order of the ranks.

    Raises:
        CheckpointError: a process cannot read the checkpoint, or read another one; raised on every process.
    """
    checkpoint = None
    failure = None
    try:
        checkpoint = read_checkpoint(path)
        check(checkpoint)
        found = f"step {checkpoint.step}, checksum {checkpoint.checksum[:12]}"
    except Exception as error:  # of any type: the other processes wait in gather_texts
        failure = error
        found = str(error) or repr(error)
    texts = gather_texts(found)
    if len(set(texts)) > 1:
        ranks = {text: [rank for rank, other in enumerate(texts) if other == text] for text in dict.fromkeys(texts)}
        raise CheckpointError(
            f"checkpoint: expected the same one of {path} on every process, got "
            + "; ".join(f"on rank {', '.join(map(str, of))}: {text}" for text, of in ranks.items())
            + "; give a folder that all machines share, or the same file to each"
        )
    if failure is not None:
        raise failure
    assert checkpoint is not None, "read_checkpoint returns a checkpoint or raises"
    return checkpoint


def check_settings_on_all_ranks(settings: Mapping[str, Any], gather_texts: Callable[[str], Sequence[str]]) -> None:
    """Reject a run whose processes have different settings or data.

    Args:
        settings: settings of this process, the result of run_settings.
        gather_texts: function that gathers one text from every process, in the order of the ranks; it may truncate long
            texts.

    Raises:
        ValueError: the settings differ; raised on every process. The message names each differing field and its values
            on rank 0 and on the first rank that differs.
    """
    flat = {name: value for part in ("data", "train", "model") for name, value in settings[part].items()}
    text = json.dumps(flat)
    texts = gather_texts(hashlib.sha256(text.encode()).hexdigest() + text)
    other = next((rank for rank, theirs in enumerate(texts) if theirs != texts[0]), None)
    if other is None:
        return
    try:
        first, theirs = (json.loads(texts[rank][64:]) for rank in (0, other))
    except ValueError:  # gather_texts truncated a text
        first = {"settings": "one record"}
        theirs = {"settings": "another"}
    differing = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
    raise ValueError(
        "; ".join(
            f"{name}: expected {first.get(name)!r} on every rank, as on rank 0, got {theirs.get(name)!r} on rank "
            f"{other}"
            for name in differing
        )
        + "; give the same settings, and data_path the same corpus, to every process"
    )


def check_settings(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Reject settings that differ from those of the run that wrote a checkpoint.

    Raises:
        CheckpointError: settings differ; the message names every differing field, its value in the checkpoint and its
            given value.
    """
    if not checkpoint.is_run:
        raise CheckpointError("checkpoint: expected one of a run, got weights alone; begin a run with them by --init")
    recorded = {part: _DEFAULTS.get(part, {}) | checkpoint.settings.get(part, {}) for part in settings}
    differing = [
        f"{field} {recorded[part].get(field)!r} in the checkpoint, {values.get(field)!r} here"
        for part, values in settings.items()
        for field in sorted({*values, *checkpoint.settings.get(part, {})})
        if decides_steps(field)  # earlier versions recorded more
        if field != "training_bytes" or field in recorded[part]  # which they did not record
        if recorded[part].get(field) != values.get(field)
    ]
    if differing:
        raise CheckpointError(
            f"checkpoint: expected the settings of its run, got others: {'; '.join(differing)}; give those of the "
            "checkpoint, or begin a run with its weights by --init"
        )


def check_model(checkpoint: Checkpoint, model: TransformerConfig) -> None:
    """Reject a model that does not compute what the model of a checkpoint computes from its weights.

    Raises:
        CheckpointError: a setting differs; the message names it.
    """
    recorded = recorded_model(checkpoint.settings)
    for name, value in asdict(model).items():
        if defines_model(name) and getattr(recorded, name) != value:
            raise CheckpointError(
                f"checkpoint: expected the model of its weights, with {name} {getattr(recorded, name)!r}, got "
                f"{value!r}; give {name} of the checkpoint"
            )


def with_model_of(path: Path | str, model: TransformerConfig, given: Collection[str]) -> TransformerConfig:
    """Return the settings of a run that begins with the weights of a checkpoint, which define its model.

    Args:
        path: a checkpoint, or a folder whose newest checkpoint is read.
        model: settings of the run.
        given: names of the settings that the user chose.

    Raises:
        CheckpointError: there is no checkpoint, or a setting that was given differs; the message names it.
    """
    path = find_checkpoint(path)
    try:
        recorded = recorded_model(_open(path)[1]["settings"])
    except (TensorFileError, SchemaError, OSError) as error:
        raise _damaged(path, error) from None
    return with_definition(recorded, model, given, f"the weights of {path}")


def with_definition(
    defining: TransformerConfig, model: TransformerConfig, given: Collection[str], source: str
) -> TransformerConfig:
    """Return settings of a run with those settings of another model that define what it computes.

    Args:
        defining: the other model.
        model: settings of the run.
        given: names of the settings that the user chose; the others may differ.
        source: what the other model is, for the message.

    Raises:
        CheckpointError: a setting that was given differs; the message names it.
    """
    defined = {name: value for name, value in asdict(defining).items() if defines_model(name)}
    for name, value in defined.items():
        if name in given and getattr(model, name) != value:
            raise CheckpointError(
                f"{name}: expected {value!r}, as in {source}, got {getattr(model, name)!r}; leave it out"
            )
    return replace(model, **defined)


def split_arrays(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays whose names have a prefix, by name without the prefix."""
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def initial_weights(weights: Mapping[str, np.ndarray], model: TransformerConfig) -> dict[str, np.ndarray]:
    """Return the parameters with which a run begins from the weights of another one.

    Args:
        weights: weights by canonical name, whose run may have had other histories of FP8, or none.
        model: configuration of the new run.
    """
    specs = parameter_specs(unsharded(model))
    histories = {
        name: np.zeros(spec.shape, model.params_dtype) for name, spec in specs.items() if is_history(spec.shape)
    }
    known = {name: array for name, array in weights.items() if name in histories or not is_history(array.shape)}
    return histories | known


class _Checksum:
    """The SHA-256 of a record and its arrays, which are added in the order of their names."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())

    def add(self, name: str, array: np.ndarray) -> None:
        """Add an array."""
        array = np.ascontiguousarray(array)
        self._digest.update(f"{name} {array.dtype} {array.shape}".encode())
        self._digest.update(array.reshape(-1).data)

    @property
    def digits(self) -> str:
        """The checksum of what was added, in hexadecimal digits."""
        return self._digest.hexdigest()


def _checksum(record: Mapping[str, Any], names: Iterable[str], read: Callable[[str], np.ndarray]) -> str:
    """Return the checksum of a record and the named arrays, read one at a time."""
    digest = _Checksum(record)
    for name in names:
        digest.add(name, read(name))
    return digest.digits


def _write_through(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Wait until renamed files of a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
