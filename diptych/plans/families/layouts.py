"""Layouts of the same matrix rows in the tensors of two formats.

Models of one architecture differ in which matrices they fuse, and in which order. A layout has named parts:
a tensor consists of repetitions, each of which has some rows of each of its parts. The query projection of Qwen3-Next,
for example, has for each head 256 rows of the part ``q`` and then 256 of the part ``gate``:

    Layout("self_attn.q_proj.weight", {"q": 256, "gate": 256}, repeats=16, tail=(2048,))

A part has the same rows in the same order in both formats, so that each format follows from the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Layout:
    """The rows of a tensor.

    Args:
        name: name of the tensor.
        parts: number of rows of each part in a repetition, by name, in their order.
        repeats: number of repetitions.
        tail: further axes of the tensor.
        axes: shape of the tensor, if it is another one of the same elements in the same order.
    """

    name: str
    parts: Mapping[str, int]
    repeats: int = 1
    tail: tuple[int, ...] = ()
    axes: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.axes or (self.repeats * sum(self.parts.values()), *self.tail)

    def rows(self, part: str) -> slice:
        """Return the rows of a part within a repetition.

        Raises:
            KeyError: the tensor has no such part.
        """
        begin = 0
        for name, count in self.parts.items():
            if name == part:
                return slice(begin, begin + count)
            begin += count
        raise KeyError(part)

    def cut(self, tensor: np.ndarray, part: str) -> np.ndarray:
        """Return the rows of a part of the tensor, [repeats, rows of the part, elements of a row]."""
        return tensor.reshape(self.repeats, sum(self.parts.values()), -1)[:, self.rows(part)]


class Link(NamedTuple):
    """Tensors that have the same parts in both formats."""

    ours: tuple[Layout, ...]
    """Tensors of this project, by canonical name."""
    theirs: tuple[Layout, ...]
    """Tensors of a Hugging Face model."""
    are_rows_of_one: bool = False
    """True if the tensors in ``theirs`` are consecutive rows of one matrix, which files may also cut at other rows."""


def assemble(
    target: Layout, sources: Sequence[Layout], read: Callable[[str], np.ndarray], dtype: np.dtype
) -> np.ndarray:
    """Return a tensor of one format from those of the other.

    One source is in memory at a time, beside the result.

    Args:
        target: layout of the result.
        sources: layouts that have the parts of the target between them.
        read: returns a tensor by name.
        dtype: type of the result.
    """
    same_parts = next((source for source in sources if [*source.parts.items()] == [*target.parts.items()]), None)
    if same_parts is not None and same_parts.repeats == target.repeats:
        return read(same_parts.name).astype(dtype, copy=False).reshape(target.shape)
    found = np.empty((target.repeats, sum(target.parts.values()), int(np.prod(target.tail))), dtype)
    for source in sources:
        shared = [part for part in target.parts if part in source.parts]
        if not shared:
            continue
        tensor = read(source.name)
        for part in shared:
            found[:, target.rows(part)] = source.cut(tensor, part).reshape(target.repeats, target.parts[part], -1)
        del tensor
    return found.reshape(target.shape)


def same(ours: str, theirs: str, shape: Sequence[int], theirs_shape: Sequence[int] | None = None) -> Link:
    """Return the link of two tensors with equal elements in equal order.

    Args:
        ours: canonical name.
        theirs: name in the other format.
        shape: shape of the tensor.
        theirs_shape: shape in the other format; None: the same.
    """
    rows, *tail = shape
    parts = {"all": rows}
    there = None if theirs_shape is None else (*theirs_shape,)
    return Link((Layout(ours, parts, 1, (*tail,)),), (Layout(theirs, parts, 1, (*tail,), there),))
