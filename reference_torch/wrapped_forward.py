"""Replacement of the forward of one instance of a module, and its restoration."""

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class WrappedForward:
    """A replacement of a module's forward, which is copied and pickled with the module; subclasses define the call.

    Args:
        module: the module.
        name: its name in the model, for messages.
    """

    is_divisible = False
    """True if a pipeline stage may begin inside the module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self._replaced = vars(module).get("forward")
        """The forward that other code had set on this instance, or None."""

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward that was replaced."""
        return type(self.module).forward.__get__(self.module) if self._replaced is None else self._replaced

    def call_plain(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward that was replaced; torch.compile can trace this, but not a call of ``plain``."""
        if self._replaced is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self._replaced(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plain)

    def install(self) -> None:
        """Make the module call this object."""
        self.module.forward = self  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def is_installed(self) -> bool:
        """True unless another forward has replaced this one, or it was undone."""
        return vars(self.module).get("forward") is self

    def undo(self) -> None:
        """Restore the replaced forward."""
        del self.module.forward
        if self._replaced is not None:
            self.module.forward = self._replaced

    def of(self, module: nn.Module) -> "WrappedForward":
        """Return the same forward of a shallow copy of the module."""
        copied = copy.copy(self)
        copied.module = module
        copied._replaced = rebound(self._replaced, self.module, module)
        return copied


def rebound(forward: Any, module: nn.Module, copied: nn.Module) -> Any:
    """Return the forward of a module's instance, bound to a shallow copy of the module."""
    if isinstance(forward, WrappedForward) and forward.module is module:
        return forward.of(copied)
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return MethodType(forward.__func__, copied)
    return forward
