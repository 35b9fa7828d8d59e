"""Calls of layers that end the observation of their forwards, also after an interruption.

PyTorch runs no forward hook after an exception that is no ``Exception``, such as the KeyboardInterrupt of Ctrl-C, and
none that was removed during the call. The saved-tensor hooks of the forward would then stay active for the process.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from reference_torch.recompute.internals import skipped_by_compile


class ObservedCall:
    """A replacement of a module's ``_call_impl``, which runs hooks and forward.

    Args:
        module: the layer.
        depth: returns the number of forwards of the layer that run.
        end_forwards: ends the observation of the forwards that began last, until its argument's number is left.
    """

    def __init__(self, module: nn.Module, depth: Callable[[], int], end_forwards: Callable[[int], None]) -> None:
        self._module = weakref.ref(module)
        self._depth = depth
        self._end_forwards = end_forwards
        self._replaced: Callable[..., Any] | None = vars(module).get("_call_impl")
        """The replacement that other code had set before, or None."""
        vars(module)["_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            NotImplementedError: torch.export traces the call.
        """
        if torch.compiler.is_exporting():
            raise NotImplementedError(
                "torch.export: expected a model whose parameters stay where they are, got an offloaded layer; close "
                "the offload manager, export, and offload again"
            )
        return self._observed(*args, **kwargs)

    @skipped_by_compile
    def _observed(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and end the observation of its forwards."""
        depth = self._depth()
        try:
            if self._replaced is not None:
                return self._replaced(*args, **kwargs)
            module = self._called()
            return type(module)._call_impl(module, *args, **kwargs)
        finally:
            if self._depth() > depth:
                self._end_forwards(depth)

    def _called(self) -> Any:
        """Return the module that is called: the layer, or a replica with a copy of its ``__dict__`` (DataParallel)."""
        frame = sys._getframe(1)
        for _ in range(16):  # torch.compile and type checkers add some
            if frame is None:
                break
            if frame.f_code.co_name == "_wrapped_call_impl":
                caller = frame.f_locals.get("self")
                if isinstance(caller, nn.Module) and vars(caller).get("_call_impl") is self:
                    return caller
            frame = frame.f_back
        return self._module()

    def undo(self) -> None:
        """Restore the call of the module, unless other code has replaced this one."""
        module = self._module()
        if module is not None and vars(module).get("_call_impl") is self:
            self.leave(vars(module))

    def leave(self, state: dict[str, Any]) -> None:
        """Restore the former ``_call_impl`` in the attributes of a module."""
        del state["_call_impl"]
        if self._replaced is not None:
            state["_call_impl"] = self._replaced
