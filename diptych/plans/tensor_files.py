"""Files in the safetensors format, read and written one tensor at a time.

A file has the length of its header in 8 bytes, the header in JSON, ``{name: {"dtype", "shape", "data_offsets"}}``, and
the tensors' bytes. The package safetensors encodes a whole file in memory; here, a file of any size takes the memory of
one tensor. NumPy has no bfloat16: such tensors become float32, exactly, and float32 is rounded to the nearest, ties to
even.

Reference: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diptych.plans.text_files import one_line, parse_json

PIECE = 2**20
"""Elements that are converted at a time between bfloat16 and float32."""
LONGEST_HEADER = 100_000_000
"""Largest accepted header in bytes, as in the package safetensors."""
BFLOAT16 = "BF16"
_STORED = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    BFLOAT16: np.dtype("<u2"),
}
"""Types of floating tensors by their name in a file; bfloat16 as its bits."""
FLOATING_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": BFLOAT16}
"""Names of the types in a file by their usual names."""


class TensorFileError(ValueError):
    """An error for a file that is not in the safetensors format."""


class TensorInfo(NamedTuple):
    """Type and shape of a tensor."""

    dtype: str
    """Name of the type in the file."""
    shape: tuple[int, ...]


class TensorFile:
    """A file whose tensors are read on demand.

    Args:
        path: path of the file.

    Raises:
        TensorFileError: the header is damaged.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise TensorFileError(
                    f"{path}: expected a safetensors file, got one of {size:,} bytes without a header"
                )
            text = file.read(length)
        try:
            header = parse_json(text.decode())
        except ValueError as error:
            raise TensorFileError(f"{path}: expected a header of JSON, got {one_line(error)}") from None
        if not isinstance(header, dict):
            raise TensorFileError(f"{path}: expected a header with an object of tensors, got {one_line(header)}")
        self._begin = 8 + length
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict) or any(not isinstance(text, str) for text in self.metadata.values()):
            raise TensorFileError(f"{path}: expected an object of texts as __metadata__, got {one_line(self.metadata)}")
        self.tensors: dict[str, TensorInfo] = {}
        """Type and shape of all tensors by name."""
        self._offsets: dict[str, int] = {}
        places: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            info, begin, end = _parse_entry(entry, size - self._begin, f"{path}, tensor {one_line(name)}")
            self.tensors[name] = info
            self._offsets[name] = self._begin + begin
            places.append((begin, end, name))
        _check_places(path, places, size - self._begin)

    def read(self, name: str) -> np.ndarray:
        """Return a floating tensor in its type; bfloat16 in float32.

        Raises:
            TensorFileError: the type is not floating.
        """
        info = self.tensors[name]
        if info.dtype not in _STORED:
            raise TensorFileError(
                f"{self.path}, tensor {name!r}: expected a type out of {', '.join(_STORED)}, got {info.dtype}"
            )
        dtype = _STORED[info.dtype]
        array = np.fromfile(self.path, dtype, math.prod(info.shape), offset=self._offsets[name])
        if info.dtype == BFLOAT16:
            array = from_bfloat16(array)
        return array.reshape(info.shape)


def _check_places(path: Path, places: list[tuple[int, int, str]], size: int) -> None:
    """Check that the half-open byte ranges of all tensors cover the data once and without holes.

    Raises:
        TensorFileError: ranges overlap or leave a hole, or end before or after the data.
    """
    reached = 0
    for begin, end, name in sorted(places):
        if begin != reached:
            raise TensorFileError(
                f"{path}, tensor {one_line(name)}: expected it to begin at byte {reached:,} of the data, where the one "
                f"before it ends, got {begin:,}; the file is damaged"
            )
        reached = end
    if reached != size:
        raise TensorFileError(f"{path}: expected {reached:,} bytes of tensors, got {size:,}; the file is damaged")


def _parse_entry(entry: Any, size: int, what: str) -> tuple[TensorInfo, int, int]:
    """Return type and shape of a tensor, and the start and end of its half-open byte range.

    Raises:
        TensorFileError: the entry is invalid, or its bytes are not in the file.
    """
    try:
        dtype = entry["dtype"]
        shape = entry["shape"]
        begin, end = entry["data_offsets"]
        is_typed = isinstance(dtype, str) and isinstance(shape, list)
        if not (is_typed and all(_is_size(x) for x in (*shape, begin, end)) and begin <= end <= size):
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise TensorFileError(
            f"{what}: expected dtype, shape and data_offsets within the file, got {one_line(entry)}"
        ) from None
    if dtype in _STORED and math.prod(shape) * _STORED[dtype].itemsize != end - begin:
        raise TensorFileError(f"{what}: expected the bytes of {dtype} {one_line(shape)}, got {end - begin:,}")
    return TensorInfo(dtype, tuple(shape)), begin, end


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 bits, exactly."""
    wide = np.empty(bits.shape, np.uint32)
    for source, target in _pieces(bits, wide):
        np.left_shift(source, 16, out=target, dtype=np.uint32)
    return wide.view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of values rounded to bfloat16, to the nearest, ties to even; NaN stays NaN."""
    wide = np.ascontiguousarray(values, np.float32)
    found = np.empty(wide.shape, np.uint16)
    for source, target in _pieces(wide, found):
        bits = source.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        target[:] = np.where(np.isnan(source), (bits >> 16) | 0x40, rounded)
    return found


def _pieces(source: np.ndarray, target: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield equal parts of two contiguous arrays, so that temporary arrays stay small."""
    source = source.reshape(-1)
    target = target.reshape(-1)
    for begin in range(0, source.size, PIECE):
        yield source[begin : begin + PIECE], target[begin : begin + PIECE]


def write_tensors(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], np.ndarray],
    finish: Callable[[], Mapping[str, str]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file atomically, one tensor at a time, and wait until it is on disk.

    Args:
        path: path of the file; its folder exists.
        tensors: type and shape of the tensors, in the order in which they are written.
        read: returns a tensor, which is rounded to its type.
        finish: called after the last tensor; its entries replace those of metadata, each with as many characters.
        metadata: texts in the header.

    Raises:
        OSError: the file cannot be written; nothing remains of it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(_header(tensors, metadata))
            for name, info in tensors.items():
                file.write(_stored(read(name), info).data)
            if finish is not None:
                file.seek(0)
                file.write(_header(tensors, {**(metadata or {}), **finish()}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _stored(array: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Return an array in the type of the file."""
    assert array.shape == info.shape, f"expected shape {info.shape}, got {array.shape}"
    if info.dtype == BFLOAT16:
        array = to_bfloat16(array)
    return np.ascontiguousarray(array, _STORED[info.dtype]).reshape(-1)


def _header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None) -> bytes:
    """Return the header, padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, info in tensors.items():
        end = begin + math.prod(info.shape) * _STORED[info.dtype].itemsize
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensors: Iterable[TensorInfo]) -> int:
    """Return the bytes of floating tensors in a file."""
    return sum(math.prod(info.shape) * _STORED[info.dtype].itemsize for info in tensors)
