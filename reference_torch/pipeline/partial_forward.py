"""The forward of a model in parts: one process runs the operations between two cuts, and none of the others.

``traced_forward.trace`` runs the forward once with fake tensors, which have shapes and no elements, and lists its
events: in the code that encloses the cuts (the enclosing code), calls of torch functions, of autograd functions and of
whole submodules. A function that reads neither arguments nor parameters, such as one that makes positions, is computed
in every part. ``PartialRun`` runs the same Python code again. Events of earlier parts return what the trace has listed,
without computation, with the received tensors in the places of those that the part needs. Events of its own part are
computed. The call of the submodule where the next part begins ends the run.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree

from reference_torch.pipeline.nested_values import (
    MISSING,
    Place,
    change,
    changes,
    containers_copied,
    contents,
    plain_in,
    same_plain,
    tensors_in,
    with_tensors_replaced,
)

Number = tuple[int, int]
"""A tensor of a forward: number of the event that made it (-1: an argument) and place among its results."""


class PartEnd(BaseException):
    """The end of a part, raised through the code of the model."""


@dataclass
class Event:
    """A call in a forward."""

    called: Any
    """Name of the submodule, the torch function, or the class of the autograd function."""
    part: int
    result: Any
    everywhere: bool = False
    """True if every part computes it: it reads neither arguments nor parameters nor random numbers."""
    plain: dict[Place, Any] = field(default_factory=dict)
    """The plain values in the result of a submodule, such as numbers."""
    changes: dict[Place, Any] = field(default_factory=dict)
    """The plain values that a submodule has changed in its arguments."""


@dataclass
class Trace:
    """The events of a forward, for arguments of given shapes."""

    events: list[Event] = field(default_factory=list)
    arguments: Any = None
    """Fake arguments of the forward, positional and by keyword."""
    crossing: list[list[Number]] = field(default_factory=list)
    """The tensors that each part receives from earlier parts, for itself or for later parts. Part 0 receives none."""
    output: Any = None
    """Structure of the output."""
    parts: dict[str, set[int]] = field(default_factory=dict)
    """Parts that call each submodule, or whose enclosing code uses each parameter or buffer, by name."""
    changed_buffers: dict[str, int] = field(default_factory=dict)
    """The part whose enclosing code changes each buffer, by name."""


_current: ContextVar["Run | None"] = ContextVar("current run of a part", default=None)


def current_run() -> "Run | None":
    """Return the run whose forward is executing in this thread."""
    return _current.get()


class Run(TorchFunctionMode):
    """A forward whose enclosing code is watched."""

    watches_functions = False
    """True if torch functions inside of an autograd function are watched too, though they are no events."""

    def __init__(self) -> None:
        super().__init__()
        self.part = 0
        self.is_inside = False
        """True inside of a submodule or an autograd function, whose operations are no events."""

    def __enter__(self) -> "Run":
        self._outer = _current.set(self)
        _watch_function_calls(1)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _watch_function_calls(-1)
        _current.reset(self._outer)
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a torch function of the enclosing code."""
        kwargs = kwargs or {}
        if self.is_inside:
            return self.inner_function(func, args, kwargs)
        if func is torch._C._set_grad_enabled:  # also at the end of a part inside of no_grad
            return func(*args, **kwargs)
        if func is Tensor.__iter__ and args[0].dim():  # an iterator could be used only once
            return iter(self.event(torch.unbind, self.unwatched(torch.unbind), args, kwargs))
        if getattr(func, "__name__", "") == "__get__" and not tensors_in(value := func(*args, **kwargs)):
            return value  # an attribute such as shape; FakeTensor has some of its own
        return self.event(func, self.unwatched(func), args, kwargs)

    def submodule(self, name: str, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Handle the call of a whole submodule."""
        if self.is_inside:
            return self.inner_submodule(name, call, args, kwargs)
        return self.event(name, self.unwatched(call), args, kwargs)

    def autograd_function(self, called: type, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Handle the call of an autograd function, such as a reentrant checkpoint."""
        if self.is_inside:
            return call(*args, **kwargs)
        return self.event(called, self.unwatched(call, self.watches_functions), args, kwargs)

    def unwatched(self, call: Callable[..., Any], watched: bool = False) -> Callable[..., Any]:
        """Return a call whose operations are no events."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            was_inside = self.is_inside
            self.is_inside = True
            on_top = not watched and _get_current_function_mode() is self
            if on_top:  # torch.compile then sees no mode
                super(Run, self).__exit__(None, None, None)
            try:
                return call(*args, **kwargs)
            finally:
                self.is_inside = was_inside
                if on_top:
                    super(Run, self).__enter__()

        return inside

    def inner_function(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Handle a torch function inside of an event."""
        return func(*args, **kwargs)

    def inner_submodule(self, name: str, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Handle the call of a whole submodule inside of an event."""
        return call(*args, **kwargs)

    def begin_part(self, name: str) -> None:
        """Handle the call of a submodule at which the next part begins."""
        raise NotImplementedError

    def event(self, called: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Handle a call."""
        raise NotImplementedError


def _autograd_function(called: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an autograd function, and let the current run handle it."""
    call = super(_SingleLevelFunction, called).apply  # pyright: ignore[reportAttributeAccessIssue]
    run = current_run()
    return call(*args, **kwargs) if run is None else run.autograd_function(called, call, args, kwargs)


_active_runs = 0
_lock = Lock()


def _watch_function_calls(more: int) -> None:
    """Let runs handle the calls of autograd functions, which no mode of torch sees, while there are runs.

    Args:
        more: 1 at the start of a run, -1 at its end.
    """
    global _active_runs
    with _lock:
        before = _active_runs
        _active_runs += more
        if before == 0:  # Function.apply, also one that was read earlier, calls the apply of this base class
            _SingleLevelFunction.apply = classmethod(_autograd_function)  # pyright: ignore[reportAttributeAccessIssue]
        elif _active_runs == 0:
            del _SingleLevelFunction.apply  # pyright: ignore[reportAttributeAccessIssue]


class PartialRun(Run):
    """The forward of one part.

    Args:
        traced: the trace for arguments of the same shapes.
        own: number of the part.
        received: tensors of earlier parts, by number.
        has_example: True if split_model had example arguments.
    """

    def __init__(self, traced: Trace, own: int, received: dict[Number, Tensor], has_example: bool) -> None:
        super().__init__()
        self.has_example = has_example
        self._trace = traced
        self._own = own
        self.tensors = received
        """Tensors that this part or a later one needs."""
        self._sent = {*traced.crossing[own + 1]} if own + 1 < len(traced.crossing) else set()
        self._next = 0

    @property
    def is_computing(self) -> bool:
        """True in the own part."""
        return self.part == self._own

    def arguments(self) -> Any:
        """Return the arguments of the model: received ones, and fake ones that this part does not need."""
        return self._received(self._trace.arguments)

    def begin_part(self, name: str) -> None:
        """Count the parts, and end after the own one."""
        if self.is_inside:  # of an autograd function, which has begun the part
            return
        if self.part == self._own:
            self._check_end()
            raise PartEnd
        self.part += 1

    def event(self, called: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of an earlier part as traced, or compute one of the own part."""
        events = self._trace.events
        expected = events[self._next] if self._next < len(events) else None
        if isinstance(called, type) and expected is not None and expected.part == self.part + 1:
            self.begin_part(called.__name__)
        if expected is None or expected.called != called or expected.part != self.part:
            raise ValueError(
                f"split_model: expected {name_of(expected.called) if expected else 'no further call'} as call "
                f"{self._next} of the model's forward, as with fake tensors of the same shapes, got {name_of(called)}; "
                "its code takes another path, by the elements of an argument such as a mask, by an attribute that a "
                "call sets for the first time (None before), or by what other stages own: leave the argument out, set "
                "the attribute before the split, or cut the model by hand, into modules"
            )
        number = self._next
        self._next += 1
        if self.part < self._own and not expected.everywhere:
            for place, new in expected.changes.items():
                change((args, kwargs), place, new)
            return self._received(expected.result)
        is_read = isinstance(called, str) and self._own + 1 < len(self._trace.crossing)
        before = contents((args, kwargs)) if is_read else {}
        result = call(*args, **kwargs)
        if expected.everywhere:
            return result
        if is_read:
            _check_plain(called, "returns", expected.plain, plain_in(result))
            _check_plain(called, "puts into an argument", expected.changes, changes(before, contents((args, kwargs))))
        for place, tensor in enumerate(tensors_in(result)):
            if isinstance(tensor, FakeTensor):
                raise ValueError(self._of_another_stage(called, (args, kwargs)))
            if (number, place) in self._sent:
                self.tensors[number, place] = tensor
        return result

    def _of_another_stage(self, called: Any, arguments: Any) -> str:
        """Return the message for a call that reads a tensor that this stage does not have."""
        begin = f"split_model: expected {name_of(called)} of stage {self._own} to read tensors of this stage, got"
        fakes = [tensor for tensor in tensors_in(arguments) if isinstance(tensor, FakeTensor)]
        numbers = [getattr(tensor, "_number", None) for tensor in fakes]
        names = [number for number in numbers if isinstance(number, str)]
        if not names and (numbers or isinstance(called, str)):
            return (
                f"{begin} one that a submodule of another stage has made and put into an attribute or an object; "
                "return it from that submodule, and pass it as an argument"
            )
        what = f"{names[0]!r} of another" if names else "one of another"
        if self.has_example:
            return f"{begin} {what}; split the model again, with example_args with which its code takes the same path"
        return f"{begin} {what}; give split_model example_args, so that every parameter goes to the stage that reads it"

    def check_output(self, output: Any) -> None:
        """Check that the last part has returned what was traced."""
        self._check_end()
        if pytree.tree_structure(output) != self._trace.output or has_fake(output):
            raise ValueError(
                f"split_model: expected an output {self._trace.output}, as with fake tensors, got "
                f"{pytree.tree_structure(output)}; it is collected in another way than by return values, for example "
                "by hooks, so ask for fewer outputs, or cut the model by hand, into modules"
            )

    def _check_end(self) -> None:
        """Check that every call that was traced has happened, since absent submodules may look empty."""
        events = self._trace.events
        if self._next < len(events) and events[self._next].part <= self._own:
            raise ValueError(
                f"split_model: expected {name_of(events[self._next].called)} as call {self._next} of the model's "
                f"forward, in stage {self._own}, got none; a container of submodules, a list or an attribute is read "
                "in another stage than the one that fills it. Give split_model example_args, so that submodules go to "
                "the stage that calls them, or cut the model by hand, into modules"
            )

    def _received(self, value: Any) -> Any:
        """Return a traced value with the received tensors in their places."""
        if not any(getattr(tensor, "_number", None) in self.tensors for tensor in tensors_in(value)):
            return containers_copied(value, {})

        def replace(tensor: Tensor) -> Any:
            number: Any = getattr(tensor, "_number", None)
            return self.tensors.get(number, tensor) if isinstance(tensor, FakeTensor) else tensor

        return with_tensors_replaced(value, replace)


def _check_plain(called: Any, does: str, traced: dict[Place, Any], found: dict[Place, Any]) -> None:
    """Check that a submodule gives the same plain values as in the trace, which later parts read."""
    for place in [*traced, *(place for place in found if place not in traced)]:
        old = traced.get(place, MISSING)
        new = found.get(place, MISSING)
        if not same_plain(old, new):
            raise ValueError(
                f"split_model: expected the plain values that {name_of(called)} {does} to be those of its run with "
                f"fake tensors, which later stages read, got {_described(new)} instead of {_described(old)}; pass a "
                "number that changes from call to call on as a tensor"
            )


def _described(value: Any) -> str:
    """Return a plain value for messages."""
    return "nothing" if value is MISSING else repr(value)[:50]


def has_fake(value: Any) -> bool:
    """Return True if a value contains a fake tensor."""
    return any(isinstance(tensor, FakeTensor) for tensor in tensors_in(value))


def name_of(called: Any) -> str:
    """Return what is called, for messages."""
    if isinstance(called, str):
        return f"submodule {called!r}"
    kind = "autograd" if isinstance(called, type) else "torch"
    return f"{kind} function {getattr(called, '__name__', called)!r}"
