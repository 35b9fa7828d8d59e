"""Weak references to a manager, so that the hooks of a model do not keep its manager alive."""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from reference_torch.offload.link import Link, OffloadError


@runtime_checkable
class Closable(Protocol):
    """A manager that can be closed."""

    def close(self) -> None:
        """Move everything to the device and remove every hook."""
        ...


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method while its object is alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        target = reference()
        return None if target is None else target(*arguments)

    return call


def close_dropped(manager: Closable, link: Link | None) -> None:
    """Close a manager to which no reference is left.

    If the device has no room for some layers, their tensors move to the device when they are read.

    Args:
        manager: the manager.
        link: its link to the host.
    """
    if link is not None and link.runs_here:  # garbage collection may run on the link's thread, which cannot wait
        threading.Thread(target=_close, args=(manager,), name="offload close").start()
    else:
        _close(manager)


def _close(manager: Closable) -> None:
    """Close a manager; layers for which the device has no room stay readable."""
    with contextlib.suppress(OffloadError):
        manager.close()
