"""What is kept for backward, by name and in bytes."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from diptych.plans.recompute import VALUES
from reference_torch.recompute.region import slot_at


class KeptValue(NamedTuple):
    """A named value kept from forward to backward."""

    shape: tuple[int, ...]
    """Of the first one of the name."""
    dtype: str
    bytes: int
    """Of all of the name together."""


class _Named(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    storage: StorageWeakRef


_named: ContextVar[list[_Named] | None] = ContextVar("_named", default=None)


def name_value(x: Tensor, name: str) -> Tensor:
    """x itself, known to residual_report as ``name``.

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


def residual_report(fn: Callable[..., Any], *args: Any) -> dict[str, KeptValue]:
    """The named values that are kept for backward once ``fn(*args)`` has returned.

    A value counts where its memory is still there although nobody but the graph of the result holds it. So the
    report says what is really resident, not what a hook was shown.

    Returns:
        Name, in order of diptych.plans.recompute.VALUES, to shape of its first value, dtype and bytes of all.
    """
    token = _named.set([])
    try:
        result = fn(*args)
        named = _named.get() or []
    finally:
        _named.reset(token)
    report: dict[str, KeptValue] = {}
    counted = {tensor.untyped_storage()._cdata for tensor in tree_leaves(result) if isinstance(tensor, Tensor)}
    for value in named:
        address = value.storage.cdata
        slot = slot_at(address)
        if address in counted or value.storage.expired() or (slot is not None and not slot.is_full):
            continue
        counted.add(address)
        earlier = report.get(value.name, KeptValue(value.shape, value.dtype, 0))
        report[value.name] = earlier._replace(bytes=earlier.bytes + value.bytes)
    return {name: report[name] for name in VALUES if name in report}
