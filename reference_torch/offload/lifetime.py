"""References to a manager that do not keep it alive: a model's hooks must not be what its manager lives by."""

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
        """Bring everything back and remove every hook."""
        ...


def weak_method(method: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that calls a bound method for as long as its object lives.

    Args:
        method: the bound method.
        otherwise: called after the object has gone; None: nothing is called.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = reference() or otherwise
        return None if alive is None else alive(*arguments)

    return call


def close_dropped(manager: Closable, link: Link | None) -> None:
    """Close a manager that nobody holds any more.

    Where the device has no room for some layers, each of their tensors comes back when it is read.
    """
    if link is not None and link.runs_here:  # the garbage collector runs where it likes; here nothing can be waited for
        threading.Thread(target=_close, args=(manager,), name="offload close").start()
    else:
        _close(manager)


def _close(manager: Closable) -> None:
    with contextlib.suppress(OffloadError):
        manager.close()
