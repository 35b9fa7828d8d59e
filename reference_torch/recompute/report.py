"""Report of the named values that are saved for backward."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from diptych.plans.recompute import VALUES
from reference_torch.recompute.region import slot_at


class SavedValue(NamedTuple):
    """All values of one name that are saved for backward."""

    shape: tuple[int, ...]
    """Shape of the first value."""
    dtype: str
    bytes: int
    """Bytes of all values of the name together."""


class _Named(NamedTuple):
    """A value that name_value has registered."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    storage: StorageWeakRef


_named: ContextVar[list[_Named] | None] = ContextVar("_named", default=None)


def name_value(x: Tensor, name: str) -> Tensor:
    """Return x, registered with residual_report under ``name``.

    Args:
        x: the value, of any shape.
        name: one of diptych.plans.recompute.VALUES.

    Raises:
        ValueError: the name is not in diptych.plans.recompute.VALUES.
    """
    if name not in VALUES:
        raise ValueError(f"name: expected one of {VALUES}, got {name!r}")
    named = _named.get()
    if named is not None:
        dtype = str(x.dtype).removeprefix("torch.")
        named.append(_Named(name, tuple(x.shape), dtype, x.nbytes, StorageWeakRef(x.untyped_storage())))
    return x


def residual_report(fn: Callable[..., Any], *args: Any) -> dict[str, SavedValue]:
    """Return the named values that are saved for backward once ``fn(*args)`` has returned.

    A value counts if its memory is still allocated and is not that of the result. The report therefore contains the
    values that are resident, not those that a hook received.

    Args:
        fn: function to call.
        args: its arguments.

    Returns:
        A dict from name to SavedValue, in the order of diptych.plans.recompute.VALUES.
    """
    token = _named.set([])
    try:
        result = fn(*args)
        named = _named.get() or []
    finally:
        _named.reset(token)
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
