"""Report of the named values that are saved for backward."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from diptych.plans.model.values import VALUES
from reference_torch.recompute.internals import outside_compiled_graphs, storage_address
from reference_torch.recompute.region import slot_at


class SavedValue(NamedTuple):
    """All values of one name that are saved for backward."""

    shape: tuple[int, ...]
    """Shape of the first value."""
    dtype: str
    bytes: int
    """Bytes of all values of the name together."""


class NamedValue(NamedTuple):
    """A value that name_value has registered."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    storage: StorageWeakRef


_recordings: ContextVar[tuple[list[NamedValue], ...]] = ContextVar("_recordings", default=())


@contextlib.contextmanager
def recorded_names() -> Iterator[list[NamedValue]]:
    """Return a context that records every value that name_value registers, in a list."""
    recording: list[NamedValue] = []
    token = _recordings.set((*_recordings.get(), recording))
    try:
        yield recording
    finally:
        _recordings.reset(token)


def name_value(x: Tensor, name: str) -> Tensor:
    """Return x, registered under ``name`` for residual_report and for offload of values by name.

    Args:
        x: the value, of any shape.
        name: one of diptych.plans.model.values.VALUES.

    Raises:
        ValueError: the name is not in diptych.plans.model.values.VALUES.
    """
    if name not in VALUES:
        raise ValueError(f"name: expected one of {VALUES}, got {name!r}")
    if _recordings.get():
        _record(x, name)
    return x


@outside_compiled_graphs
def _record(x: Tensor, name: str) -> None:
    """Add a value to all recordings; tensors of vmap and sparse tensors, which have no storage, are left out."""
    if storage_address(x) is None:
        return
    dtype = str(x.dtype).removeprefix("torch.")
    value = NamedValue(name, tuple(x.shape), dtype, x.nbytes, StorageWeakRef(x.untyped_storage()))
    for recording in _recordings.get():
        recording.append(value)


def residual_report(fn: Callable[..., Any], *args: Any) -> dict[str, SavedValue]:
    """Return the named values that are saved for backward once ``fn(*args)`` has returned.

    A value counts if its memory is still allocated and is not that of the result. The report therefore contains the
    values that are resident, not those that a hook received.

    Args:
        fn: function to call.
        args: its arguments.

    Returns:
        A dict from name to SavedValue, in the order of diptych.plans.model.values.VALUES.
    """
    with recorded_names() as named:
        result = fn(*args)
    report: dict[str, SavedValue] = {}
    counted = {tensor.untyped_storage()._cdata for tensor in tree_leaves(result) if isinstance(tensor, Tensor)}
    for value in named:
        address = value.storage.cdata
        slot = slot_at(address)
        if address in counted or value.storage.expired() or (slot is not None and not slot.is_full):
            continue
        counted.add(address)
        earlier = report.get(value.name, SavedValue(value.shape, value.dtype, 0))
        report[value.name] = earlier._replace(bytes=earlier.bytes + value.bytes)
    return {name: report[name] for name in VALUES if name in report}
