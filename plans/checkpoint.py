"""Checkpoints: one file a step, written whole or not at all, readable by both backends.

A checkpoint is a safetensors file ``step_00000100.safetensors`` with the arrays

    model.<name>, first_moment.<name>, second_moment.<name>      <name>: canonical parameter name

and, in its header, one JSON record: format version, step, settings of model, training and data, and a
checksum over arrays and record. The step is all the position there is: batches, dropout masks and the
learning rate are functions of it. Any safetensors reader can take the weights out.

A file is written beside its final place, flushed to the disk, and then renamed: whenever a process is
killed, the folder holds the last whole checkpoint.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as encode

from plans.config import TrainConfig, TransformerConfig
from plans.data import Corpus

FORMAT_VERSION = 1
RECORD = "diptych"
"""Key of the JSON record in the file's header."""
MODEL, FIRST_MOMENT, SECOND_MOMENT = "model.", "first_moment.", "second_moment."


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or used here."""


class Checkpoint(NamedTuple):
    """A training run between two steps."""

    step: int
    """Optimizer steps taken; the next step's number."""
    arrays: dict[str, np.ndarray]
    """Parameters and both moments of AdamW, by prefixed canonical name."""
    settings: dict[str, Any]
    """``model``, ``train`` and ``data``: what the run was started with."""
    checksum: str = ""
    """Of one that was read: over all of it."""


def run_settings(model: TransformerConfig, train: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """The settings a checkpoint records: those that decide what every step does.

    What is recomputed and how the model is cut into stages decides memory and time only, and impl rounding besides;
    they may change when a run is resumed.
    """
    packed = {} if corpus.training_documents is None else {"reset_attention_mask": True}
    return {
        "model": {name: value for name, value in asdict(model).items() if _decides_steps(name)},
        "train": asdict(train),
        "data": {"corpus_digest": corpus.digest, "data_seed": corpus.seed} | packed,
    }


def write_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write a checkpoint and remove all but the newest ``keep``.

    Returns:
        Its path.

    Raises:
        CheckpointError: the folder cannot be written to, or the disk is full; earlier checkpoints stay.
    """
    path = folder / f"step_{checkpoint.step:08d}.safetensors"
    partial = folder / f".{path.name}.{os.getpid()}.partial"
    record = {"format": FORMAT_VERSION, "step": checkpoint.step, "settings": checkpoint.settings}
    record["checksum"] = _checksum(checkpoint.arrays, record)
    content = encode(checkpoint.arrays, {RECORD: json.dumps(record)})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".step_*.partial"):
            stale.unlink()
        _write_through(partial, content)
        os.replace(partial, path)
        _flush_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise CheckpointError(
            f"checkpoint: expected to write {len(content):,} bytes to {path}, got {error.strerror or error}; "
            "earlier checkpoints are untouched"
        ) from None
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The folder's checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step_*.safetensors") if re.fullmatch(r"step_\d{8,}", path.stem))


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read and verify a checkpoint: a file, or the newest of a folder.

    Raises:
        CheckpointError: there is none; it is damaged, or of a later format.
    """
    path = Path(path)
    if path.is_dir():
        found = list_checkpoints(path)
        if not found:
            raise CheckpointError(f"checkpoint: expected step_*.safetensors in {path}, got none; save one first")
        path = found[-1]
    elif not path.exists():
        raise CheckpointError(f"checkpoint: expected a file or folder, got {path}, which does not exist")
    remedy = "remove it to go on from the one before it"
    try:
        with safe_open(path, "np") as file:
            record = json.loads((file.metadata() or {})[RECORD])
            version = record["format"]
            names = file.keys()
            arrays = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"checkpoint: expected a whole checkpoint in {path}, got {error!r}; {remedy}") from None
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint: expected format {FORMAT_VERSION} or earlier in {path}, got {version}; a later version "
            "wrote it, use that one"
        )
    checksum = record.pop("checksum", None)
    if checksum != _checksum(arrays, record):
        raise CheckpointError(f"checkpoint: expected {path} as it was written, got another checksum; {remedy}")
    return Checkpoint(record["step"], arrays, record["settings"], checksum)


def read_alike(path: Path | str, settings: Mapping[str, Any], tell: Callable[[str], Sequence[str]]) -> Checkpoint:
    """Read the checkpoint of a run on all its processes, which have to find the same one.

    A folder may lie on each machine's own disk, and its newest checkpoint differ; ranks would go on from both.

    Args:
        path: as read_checkpoint takes it.
        settings: of the run; see check_settings.
        tell: gives every process what all of them said, in order of their ranks.

    Raises:
        CheckpointError: on every process alike: one of them cannot read it, or found another than the rest.
    """
    checkpoint = failure = None
    try:
        checkpoint = read_checkpoint(path)
        check_settings(checkpoint, settings)
        found = f"step {checkpoint.step}, checksum {checkpoint.checksum[:12]}"
    except Exception as error:  # whatever it is: the other processes wait to be told
        failure, found = error, str(error) or repr(error)
    said = tell(found)
    if len(set(said)) > 1:
        ranks = {text: [rank for rank, other in enumerate(said) if other == text] for text in dict.fromkeys(said)}
        raise CheckpointError(
            f"checkpoint: expected the same one of {path} on every process, got "
            + "; ".join(f"on rank {', '.join(map(str, of))}: {text}" for text, of in ranks.items())
            + "; give a folder that all machines share, or the same file to each"
        )
    if failure is not None:
        raise failure
    assert checkpoint is not None, "what was not read has a reason"
    return checkpoint


def check_settings(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Refuse to go on with a run under other settings.

    Raises:
        CheckpointError: naming every differing field, its value in the checkpoint and now.
    """
    differing = [
        f"{field} {checkpoint.settings.get(part, {}).get(field)!r} there, {values.get(field)!r} here"
        for part, values in settings.items()
        for field in sorted({*values, *checkpoint.settings.get(part, {})})
        if _decides_steps(field)  # earlier versions recorded more
        if checkpoint.settings.get(part, {}).get(field) != values.get(field)
    ]
    if differing:
        raise CheckpointError(f"checkpoint: expected the settings of its run, got others: {'; '.join(differing)}")


def _decides_steps(name: str) -> bool:
    """Whether a model's setting decides what every step does, and not only where and how it is computed."""
    return name not in _EXECUTION and not any(part in name for part in ("recompute", "pipeline", "offload"))


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
        "fp8",
    }
)


def split_arrays(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays under one prefix, by canonical name."""
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def _checksum(arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _write_through(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Wait until the disk has the folder's new names."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
