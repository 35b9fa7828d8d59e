"""Weak references to a manager, so that the hooks of a model do not keep its manager alive."""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from reference_torch.offload.link import Link, OffloadError


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method while its object is alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        target = reference()
        return None if target is None else target(*arguments)

    return call


def close_dropped(close: Callable[[], None], link: Link | None) -> None:
    """Close a manager to which no reference is left.

    If the device has no room for some layers, their tensors move to the device when they are read.

    Args:
        close: moves everything to the device and removes every hook.
        link: the manager's link to the host.
    """

    def run() -> None:
        with contextlib.suppress(OffloadError):
            close()

    if link is not None and link.runs_here:  # garbage collection may run on the link's thread, which cannot wait
        threading.Thread(target=run, name="offload close").start()
    else:
        run()
