"""The forward of a model in parts: one process runs the operations between two cuts, and none of the others.

``trace`` runs the forward once with fake tensors, which have shapes and no elements, and lists its events: calls of
torch functions in the code that encloses the cuts (the enclosing code), and calls of whole submodules. A function that
reads neither arguments nor parameters, such as one that makes positions, is computed in every part. ``PartialRun``
runs the same Python code again. Events of earlier parts return what the trace has listed, without computation, with the
received tensors in the places of those that the part needs. Events of its own part are computed. The call of the
submodule where the next part begins ends the run.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from reference_torch.pipeline.payloads import TensorSpec

Number = tuple[int, int]
"""A tensor of a forward: number of the event that made it (-1: an argument) and place among its results."""


class PartEnd(BaseException):
    """The end of a part, raised through the code of the model."""


@dataclass
class Event:
    """A call in a forward."""

    called: Any
    """Name of the submodule, or the torch function."""
    part: int
    result: Any
    everywhere: bool = False
    """True if every part computes it: it reads neither arguments nor parameters nor random numbers."""


@dataclass
class Trace:
    """The events of a forward, for arguments of given shapes."""

    events: list[Event] = field(default_factory=list)
    arguments: Any = None
    """Fake arguments of the forward, positional and by keyword."""
    crossing: list[list[Number]] = field(default_factory=list)
    """The tensors that each part needs from earlier ones, also those that it only passes on. Part 0 needs none."""
    output: Any = None
    """Structure of the output."""
    parts: dict[str, set[int]] = field(default_factory=dict)
    """Parts that call each submodule, or use each parameter or buffer of the enclosing code, by name."""
    changed_buffers: dict[str, int] = field(default_factory=dict)
    """The part whose enclosing code changes each buffer, by name."""


_current: ContextVar["_Run | None"] = ContextVar("current run of a part", default=None)


def current_run() -> "_Run | None":
    """Return the run whose forward is executing in this thread."""
    return _current.get()


class _Run(TorchFunctionMode):
    """A forward whose enclosing code is watched."""

    def __init__(self) -> None:
        super().__init__()
        self.part = 0
        self._inside = False
        """True inside of a submodule, whose functions are no events."""

    def __enter__(self) -> "_Run":
        self._outer = _current.set(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _current.reset(self._outer)
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a torch function of the enclosing code."""
        if self._inside:
            return func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "__get__" and not _tensors(value := func(*args, **(kwargs or {}))):
            return value  # an attribute such as shape; FakeTensor has some of its own
        return self.event(func, func, args, kwargs or {})

    def submodule(self, name: str, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Handle the call of a whole submodule."""
        if self._inside:
            return call(*args, **kwargs)

        def unwatched(*args: Any, **kwargs: Any) -> Any:
            self._inside = True
            on_top = _get_current_function_mode() is self
            if on_top:  # torch.compile then sees no mode
                super(_Run, self).__exit__(None, None, None)
            try:
                return call(*args, **kwargs)
            finally:
                self._inside = False
                if on_top:
                    super(_Run, self).__enter__()

        return self.event(name, unwatched, args, kwargs)

    def begin_part(self, name: str) -> None:
        """Handle the call of a submodule at which the next part begins."""
        raise NotImplementedError

    def event(self, called: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Handle a call."""
        raise NotImplementedError


class _TracingRun(_Run):
    """The forward with fake tensors.

    Args:
        cuts: submodules at which the parts after the first begin.
        mode: mode of the fake tensors.
        buffers: buffers of the enclosing code, by name.
    """

    def __init__(self, cuts: list[str], mode: FakeTensorMode, buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self._cuts = cuts
        self._mode = mode
        self._buffers = buffers
        self._versions = {name: buffer._version for name, buffer in buffers.items()}
        self._made_in: dict[Number, int] = {}
        self.trace = Trace(crossing=[[] for _ in range(len(cuts) + 1)])

    def number_all(self, value: Any, event: int) -> None:
        """Give numbers to the tensors of a result that have none."""
        for place, tensor in enumerate(_tensors(value)):
            if isinstance(tensor, FakeTensor) and not hasattr(tensor, "_number"):
                tensor._number = (event, place)  # pyright: ignore[reportAttributeAccessIssue]
                self._made_in[event, place] = self.part

    def begin_part(self, name: str) -> None:
        """Count the parts, whose order must be that of the cuts."""
        expected = self._cuts[self.part] if self.part < len(self._cuts) else None
        if name != expected:
            raise ValueError(
                f"cuts: expected submodules in the order in which the model calls them, each once, got a call of "
                f"{name!r} {f'before {expected!r}' if expected else 'again'}; change their order, or cut elsewhere"
            )
        self.part += 1

    def event(self, called: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a call with fake tensors and list it."""
        everywhere = False
        if isinstance(called, str):
            self.trace.parts.setdefault(called, set()).add(self.part)
            with self._mode:
                result = call(*args, **kwargs)
        else:
            _check_in_place(called, args, kwargs)
            state = torch.get_rng_state()
            result = call(*args, **kwargs)
            everywhere = not _has_fake((args, kwargs, result))
            if everywhere and not torch.equal(state, torch.get_rng_state()):
                torch.set_rng_state(state)
                everywhere = False
                with self._mode:
                    result = call(*args, **kwargs)
        if result is None or isinstance(called, str) or _tensors(result):  # anything else is metadata, not elements
            self.use((args, kwargs))
        self.number_all(result, len(self.trace.events))
        self.trace.events.append(Event(called, self.part, result, everywhere))
        for name, buffer in self._buffers.items():
            if buffer._version != self._versions[name]:
                self._versions[name] = buffer._version
                self.note_change(name, self.part)
        return result

    def note_change(self, name: str, part: int) -> None:
        """Note that the enclosing code of a part changes a buffer, which no other part may use."""
        self.trace.changed_buffers.setdefault(name, part)
        self.trace.parts.setdefault(name, set()).add(part)

    def check_buffers(self, present: dict[str, Any]) -> None:
        """Check that each buffer that the enclosing code changes belongs to one part.

        Args:
            present: the buffers at the end, by name.
        """
        for name, buffer in present.items():
            number = getattr(buffer, "_number", None)
            if buffer is not self._buffers[name]:
                self.note_change(name, self._made_in[number] if isinstance(number, tuple) else 0)
        for name, part in self.trace.changed_buffers.items():
            others = sorted(self.trace.parts[name] - {part})
            if others:
                raise ValueError(
                    f"split_model: expected buffer {name!r}, which stage {part} changes in the code around the cuts, "
                    f"to be used by no other stage, got it used in stage {others[0]}; move it into a submodule that "
                    "one stage calls, or cut elsewhere"
                )

    def use(self, value: Any) -> None:
        """Note that this part needs the tensors of a value."""
        for tensor in _tensors(value):
            number = getattr(tensor, "_number", None)
            if isinstance(number, str):  # the name of a parameter
                self.trace.parts.setdefault(number, set()).add(self.part)
            if not isinstance(number, tuple):
                continue
            for part in range(self._made_in[number] + 1, self.part + 1):
                if number not in self.trace.crossing[part]:
                    self.trace.crossing[part].append(number)


def trace(
    model: nn.Module,
    cuts: list[str],
    arguments: Any,
    mode: FakeTensorMode,
    device: torch.device | str,
    enclosing_buffers: dict[str, tuple[nn.Module, str]],
) -> Trace:
    """Run a model with fake tensors. Neither saved-tensor hooks nor dispatch modes see the run.

    Args:
        model: a model with fake parameters, whose submodules call ``current_run``.
        cuts: submodules at which the parts after the first begin.
        arguments: pair of positional and keyword arguments, with TensorSpec in place of tensors.
        mode: mode of the fake parameters.
        device: device of the arguments.
        enclosing_buffers: buffers of the enclosing code: by name, the submodule and the name there.

    Raises:
        ValueError: a cut is not called, or out of order; a buffer that one part changes is used by another.
        Exception: an error of the model with fake tensors, with a note that says so.
    """
    owners = {name: place for name, place in enclosing_buffers.items() if place[0]._buffers[place[1]] is not None}
    buffers: dict[str, Any] = {name: module._buffers[key] for name, (module, key) in owners.items()}
    run = _TracingRun(cuts, mode, buffers)
    args, kwargs = run.trace.arguments = _fake(arguments, mode, device)
    run.number_all(run.trace.arguments, -1)
    for name, tensor in [*model.named_parameters(), *buffers.items()]:
        tensor._number = name  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with _disable_current_modes(), saved_tensors_hooks(_without_graph, lambda tensor: tensor), run:
            output = model(*args, **kwargs)
            run.use(output)
            run.trace.output = pytree.tree_structure(output)
        run.check_buffers({name: module._buffers[key] for name, (module, key) in owners.items()})
    except Exception as error:
        if not isinstance(error, ValueError) or not str(error).startswith(("cuts", "split_model")):
            error.add_note(
                "split_model runs the model once with tensors that have shapes and no elements, to learn which tensors "
                "cross a cut. If the code around the cuts depends on elements, cut the model by hand, into modules"
            )
        raise
    finally:
        for name, (module, key) in owners.items():
            module._buffers[key] = buffers[name]
    if run.part < len(cuts):
        raise ValueError(f"cuts: expected submodules that forward calls, got {cuts[run.part]!r}, which it did not call")
    return run.trace


def _without_graph(tensor: Tensor) -> Tensor:
    """Return a tensor to save for backward that holds no node, whose output it may be."""
    with torch._C.DisableTorchFunction():  # no event of the model
        return tensor.detach() if tensor.grad_fn is not None else tensor


def _fake(arguments: Any, mode: FakeTensorMode, device: torch.device | str) -> Any:
    """Return arguments with fake tensors in place of TensorSpec."""

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(make, arguments, is_leaf=lambda leaf: isinstance(leaf, TensorSpec))


class PartialRun(_Run):
    """The forward of one part.

    Args:
        traced: the trace for arguments of the same shapes.
        own: number of the part.
        received: tensors of earlier parts, by number.
    """

    def __init__(self, traced: Trace, own: int, received: dict[Number, Tensor]) -> None:
        super().__init__()
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
        if self.part == self._own:
            self._check_end()
            raise PartEnd
        self.part += 1

    def event(self, called: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of an earlier part as traced, or compute one of the own part."""
        events = self._trace.events
        expected = events[self._next] if self._next < len(events) else None
        if expected is None or expected.called != called or expected.part != self.part:
            raise ValueError(
                f"split_model: expected {_name(expected.called) if expected else 'no further call'} as call "
                f"{self._next} of the model's forward, as with fake tensors of the same shapes, got {_name(called)}; "
                "its code takes another path, by the elements of an argument such as a mask or by what other stages "
                "own: leave the argument out, or cut the model by hand, into modules"
            )
        number = self._next
        self._next += 1
        if self.part < self._own and not expected.everywhere:
            return self._received(expected.result)
        result = call(*args, **kwargs)
        if expected.everywhere:
            return result
        for place, tensor in enumerate(_tensors(result)):
            if isinstance(tensor, FakeTensor):
                raise ValueError(
                    f"split_model: expected {_name(called)} of stage {self._own} to read tensors of this stage, got "
                    "one of another; give split_model example_args, so that every parameter goes to the stage that "
                    "reads it"
                )
            if (number, place) in self._sent:
                self.tensors[number, place] = tensor
        return result

    def check_output(self, output: Any) -> None:
        """Check that the last part has returned what was traced."""
        self._check_end()
        if pytree.tree_structure(output) != self._trace.output or _has_fake(output):
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
                f"split_model: expected {_name(events[self._next].called)} as call {self._next} of the model's "
                f"forward, in stage {self._own}, got none; a container of submodules, a list or an attribute is read "
                "in another stage than the one that fills it. Give split_model example_args, so that submodules go to "
                "the stage that calls them, or cut the model by hand, into modules"
            )

    def _received(self, value: Any) -> Any:
        """Return a traced value with the received tensors in their places."""
        if not any(getattr(tensor, "_number", None) in self.tensors for tensor in _tensors(value)):
            return value

        def replace(leaf: Any) -> Any:
            number: Any = getattr(leaf, "_number", None)
            return self.tensors.get(number, leaf) if isinstance(leaf, FakeTensor) else leaf

        return pytree.tree_map(replace, value)


def _check_in_place(function: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse to write something that only one part has into a tensor that every part makes for itself."""
    name = getattr(function, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in _IN_PLACE
    own = in_place and args and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor)
    if own and _has_fake((args[1:], kwargs)):
        raise ValueError(
            "split_model: expected the code around the cuts not to write activations into a tensor that it makes "
            f"itself, got {name!r} on a tensor {[*args[0].shape]}; make it of an activation, as x.new_zeros does, or "
            "write the operation out of place"
        )


_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


def _has_fake(value: Any) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in _tensors(value))


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _name(called: Any) -> str:
    if isinstance(called, str):
        return f"submodule {called!r}"
    return f"torch function {getattr(called, '__name__', called)!r}"
