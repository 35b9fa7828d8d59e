"""The run of a model with fake tensors, which finds what each part of the forward needs of earlier parts."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from reference_torch.pipeline.attribute_reads import AttributeReads, end_part
from reference_torch.pipeline.global_values import GlobalCaches
from reference_torch.pipeline.nested_values import PLAIN, changes, containers_copied, contents, plain_in, tensors_in
from reference_torch.pipeline.partial_forward import Event, Number, Run, Trace, has_fake, name_of
from reference_torch.pipeline.payloads import TensorSpec
from reference_torch.pipeline.python_randomness import PythonRandomness
from reference_torch.pipeline.real_tensors import RealTensors, storage_of
from reference_torch.recompute import internals


class TracedModel(NamedTuple):
    """A model with fake parameters and buffers, whose submodules call ``current_run``."""

    model: nn.Module
    cuts: list[str]
    """Submodules at which the parts after the first begin."""
    mode: FakeTensorMode
    """Mode of the fake tensors."""
    enclosing: Mapping[str, nn.Module]
    """Submodules that enclose a cut, by name."""
    whole: Mapping[str, nn.Module]
    """The others that the enclosing code calls, by name."""

    def enclosing_buffers(self) -> dict[str, tuple[nn.Module, str]]:
        """Return the buffers of the enclosing submodules: by name, the submodule and the name there."""
        modules = self.enclosing.items()
        return {f"{name}.{key}".lstrip("."): (module, key) for name, module in modules for key in module._buffers}


class _Held(NamedTuple):
    """A tensor that a submodule leaves in an attribute, or in an object that it receives."""

    tensor: Tensor
    part: int
    attribute: str | None


class _InnerBuffers:
    """The buffers of whole submodules.

    Args:
        whole: the submodules, by name.
    """

    def __init__(self, whole: Mapping[str, nn.Module]) -> None:
        self._modules = [
            (owner, path, module, self._versions(module))
            for owner, each in whole.items()
            for path, module in each.named_modules(prefix=owner)
        ]
        self._buffers = [[*module.buffers()] for module in whole.values()]  # their identities stay theirs

    def _versions(self, module: nn.Module) -> dict[str, Any]:
        return {
            key: None if buffer is None else (id(buffer), buffer._version) for key, buffer in module._buffers.items()
        }

    def check(self, parts: Mapping[str, set[int]]) -> None:
        """Refuse that the enclosing code of one part reads a buffer that a submodule of another part changes.

        Args:
            parts: parts that call each submodule, or whose enclosing code reads each buffer.
        """
        for owner, path, module, versions in self._modules:
            read = [name for key in versions if (name := f"{path}.{key}") in parts]
            if read and self._versions(module) != versions:  # batch_norm changes its averages without a new version
                users = sorted(parts[read[0]] | parts.get(owner, set()))
                if len(users) > 1:
                    raise ValueError(
                        f"split_model: expected buffer {read[0]!r}, which a forward changes, to be used by one stage, "
                        f"got it used in the stages {users}; return a copy of it from submodule {owner!r}, or cut "
                        "elsewhere"
                    )


class _TracingRun(Run):
    """The forward with fake tensors.

    Args:
        traced: the model.
        buffers: buffers of the enclosing code, by name.
        is_exact: True to know draws of random numbers for sure, which is slow.
    """

    watches_functions = True

    def __init__(self, traced: TracedModel, buffers: dict[str, Tensor], is_exact: bool) -> None:
        super().__init__()
        self._traced = traced
        self._buffers = buffers
        self._versions = {name: buffer._version for name, buffer in buffers.items()}
        self._buffers_inside = _InnerBuffers(traced.whole)
        self._results: dict[Number, tuple[Tensor, int]] = {}
        """The results of events and the arguments of the model, with the parts that make them."""
        self._held: dict[int, _Held] = {}
        self._generators: dict[torch.Generator, int] = {}
        """The part that draws from each generator."""
        self._changed: list[tuple[Tensor, int, Any]] = []
        """Tensors that an event has changed in place, with its part and what it called."""
        self._real = RealTensors(traced.enclosing)
        self._is_transforming = False
        """True if the enclosing code has applied a transform of torch.func to a fake tensor."""
        self._inner: list[Any] | None = None
        """Arguments of calls inside of an autograd function; None outside."""
        self._inner_submodules: list[str] = []
        self.randomness = PythonRandomness(traced.model.modules(), is_exact)
        self.trace = Trace(crossing=[[] for _ in range(len(traced.cuts) + 1)])

    def number_all(self, value: Any, event: int) -> None:
        """Give numbers to the tensors of a result that have none."""
        for place, tensor in enumerate(tensors_in(value)):
            if isinstance(tensor, FakeTensor) and not self._is_known(tensor):
                tensor._number = (event, place)  # pyright: ignore[reportAttributeAccessIssue]
                self._results[event, place] = tensor, self.part

    def _is_known(self, tensor: Tensor) -> bool:
        """Return True for a parameter, a buffer, and a tensor with a number of this run."""
        number: Any = getattr(tensor, "_number", None)
        return isinstance(number, str) or (number in self._results and self._results[number][0] is tensor)

    def begin_part(self, name: str) -> None:
        """Count the parts, whose order must be that of the cuts."""
        expected = self._traced.cuts[self.part] if self.part < len(self._traced.cuts) else None
        if name != expected:
            raise ValueError(
                f"cuts: expected submodules in the order in which the model calls them, each once, got a call of "
                f"{name!r} {f'before {expected!r}' if expected else 'again'}; change their order, or cut elsewhere"
            )
        if self.is_inside and (self._inner is None or self._inner_submodules):
            raise ValueError(
                f"cuts: expected submodules that begin a part, got {name!r}, called in the middle of a reentrant "
                "checkpoint, of another autograd function or of a submodule; give checkpoint use_reentrant=False, or "
                "cut elsewhere"
            )
        end_part(self.part)
        self.part += 1

    def event(self, called: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a call with fake tensors and list it."""
        self.check_randomness(f"before {name_of(called)}")
        self._is_transforming |= _has_transformed((args, kwargs))
        before = contents((args, kwargs)) if isinstance(called, str) else {}
        versions = _versions((args, kwargs))
        everywhere = False
        if isinstance(called, str):
            self.trace.parts.setdefault(called, set()).add(self.part)
            result = self._call_submodule(called, call, args, kwargs)
        elif isinstance(called, type):
            result = self._call_autograd_function(call, args, kwargs)
        else:
            result, everywhere = self._call_torch_function(called, call, args, kwargs)
        if result is None or not callable(called) or isinstance(called, type) or tensors_in(result):
            self.use((args, kwargs))  # otherwise the result is metadata, not elements
        self.number_all(result, len(self.trace.events))
        event = Event(called, self.part, containers_copied(result, {}), everywhere)
        self.trace.events.append(event)
        if isinstance(called, str):
            event.plain = plain_in(result)
            event.changes = changes(before, contents((args, kwargs)))
            self._note_held(self._traced.whole.get(called), called, (args, kwargs))
        old = {id(tensor): version for tensor, version in versions}
        now = _versions((args, kwargs))
        self._changed += [(each, self.part, called) for each, version in now if old.get(id(each), version) != version]
        self._note_changed_buffers()
        self.randomness.note()
        return result

    def _call_submodule(self, name: str, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of a whole submodule."""
        try:
            with self._traced.mode:
                return call(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"split_model: expected submodule {name!r} to have operations and shapes that do not depend on the "
                f"elements of tensors, got {error.func}; use torch.where in place of if, and masks in place of "
                "indices, or cut the model by hand, into modules"
            ) from error

    def _call_torch_function(
        self, called: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, bool]:
        """Return the result of a torch function, and whether every part computes it."""
        self._real.check_written(called, args, kwargs)
        self._check_hook(getattr(called, "__name__", ""), args)
        generators = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        for generator in generators:
            self._note_generator(generator)
        generators.append(torch.default_generator)
        states = [generator.get_state() for generator in generators]
        with self._real.changes(called, args, kwargs) as changes:
            result = call(*args, **kwargs)
        if has_fake((args, kwargs, result)):
            return result, False
        if all(torch.equal(state, each.get_state()) for state, each in zip(states, generators, strict=True)):
            return result, True
        for state, generator in zip(states, generators, strict=True):
            generator.set_state(state)
        changes.check_none()
        with self._traced.mode:
            return call(*args, **kwargs), False

    def _check_hook(self, function: str, args: tuple) -> None:
        """Refuse a hook on a tensor whose gradient this part does not have as a whole."""
        if function not in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad"):
            return
        number: Any = getattr(args[0], "_number", None)
        if isinstance(number, str) and function != "retain_grad":
            raise ValueError(
                f"split_model: expected the code around the cuts not to give hooks to parameters, got {function!r} on "
                f"{number!r}; register the hook once, on the stages"
            )
        part = self._results[number][1] if number in self._results else self.part
        if part != self.part:
            raise ValueError(
                f"split_model: expected hooks on a tensor in stage {part}, which makes it, got {function!r} in stage "
                f"{self.part}; call it before the next cut"
            )

    def check_aliases(self) -> None:
        """Refuse a change in place of a tensor that came from another part with others in the same memory."""
        for changed, part, called in self._changed:
            storage = storage_of(changed)
            received = [self._results[number][0] for number in self.trace.crossing[part]]
            if sum(storage_of(tensor) == storage for tensor in received) > 1:
                raise ValueError(
                    f"split_model: expected tensors that cross a cut to have memory of their own if they are changed "
                    f"in place, got {name_of(called)} in stage {part} on a tensor {[*changed.shape]}, of which this "
                    "stage also reads a view made earlier; write the operation out of place, or clone the view"
                )

    def _call_autograd_function(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of an autograd function, at whose first submodule a part may begin."""
        self._inner = []
        self._inner_submodules = []
        try:
            with self._traced.mode:
                result = call(*args, **kwargs)
        finally:
            inner = self._inner
            self._inner = None
        self.use(inner, inside=True)
        for name in self._inner_submodules:
            self.trace.parts.setdefault(name, set()).add(self.part)
            self._note_held(self._traced.whole.get(name), name, ())
        return result

    def inner_function(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Note what a torch function inside of an autograd function reads."""
        if self._inner is not None:
            self._inner.append((args, kwargs))
        return func(*args, **kwargs)

    def inner_submodule(self, name: str, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Note the call of a whole submodule inside of an autograd function."""
        if self._inner is None:
            return call(*args, **kwargs)
        self._inner.append((args, kwargs))
        self._inner_submodules.append(name)
        inner = self._inner
        self._inner = None  # functions of the submodule read its own parameters
        try:
            return self.unwatched(call)(*args, **kwargs)
        finally:
            self._inner = inner

    def check_randomness(self, where: str) -> None:
        """Refuse random numbers of Python or NumPy in the enclosing code, which every part would draw.

        Args:
            where: place in the model's forward, for the message.
        """
        if self.randomness.is_drawn():
            raise ValueError(
                "split_model: expected the code around the cuts to draw random numbers from torch, got a draw from "
                f"Python's random or from NumPy {where}, which every stage would repeat; draw in a submodule that one "
                "stage calls, or with torch.rand"
                + ", or let other threads wait that draw from NumPy meanwhile"
                * self.randomness.has_other_threads
            )

    def _note_generator(self, generator: torch.Generator) -> None:
        """Note a draw from a generator, whose state only one part may have."""
        part = self._generators.setdefault(generator, self.part)
        if part != self.part:
            raise ValueError(
                f"split_model: expected the code around the cuts to draw from a torch.Generator in one stage, got "
                f"draws in the stages {part} and {self.part}, whose processes have states of their own; draw all "
                "before the first cut, or give each stage a generator"
            )

    def _note_held(self, module: nn.Module | None, name: str, arguments: Any) -> None:
        """Note the tensors that a call of a whole submodule has left behind."""
        found = [(tensor, None) for tensor in tensors_in(arguments)]
        for path, inner in module.named_modules(prefix=name) if module is not None else ():
            for key, value in vars(inner).items():
                if key not in ("_parameters", "_modules", "forward") and not isinstance(value, PLAIN):
                    found += [(tensor, path if key == "_buffers" else f"{path}.{key}") for tensor in tensors_in(value)]
        for tensor, attribute in found:
            if isinstance(tensor, FakeTensor) and not self._is_known(tensor) and id(tensor) not in self._held:
                self._held[id(tensor)] = _Held(tensor, self.part, attribute)

    def _note_changed_buffers(self) -> None:
        """Note the buffers of the enclosing code that an event has changed."""
        for name, buffer in self._buffers.items():
            if buffer._version != self._versions[name]:
                self._versions[name] = buffer._version
                self.note_change(name, self.part)

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
            number: Any = getattr(buffer, "_number", None)
            if buffer is not self._buffers[name]:
                self.note_change(name, self._results[number][1] if number in self._results else 0)
        self._buffers_inside.check(self.trace.parts)
        for name, part in self.trace.changed_buffers.items():
            others = sorted(self.trace.parts[name] - {part})
            if others:
                raise ValueError(
                    f"split_model: expected buffer {name!r}, which stage {part} changes in the code around the cuts, "
                    f"to be used by no other stage, got it used in stage {others[0]}; move it into a submodule that "
                    "one stage calls, or cut elsewhere"
                )

    def use(self, value: Any, inside: bool = False) -> None:
        """Note that this part needs the tensors of a value.

        Args:
            value: arguments of an event, or the output of the model.
            inside: True for what an autograd function reads, which has also made some of it.
        """
        direct = {id(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}
        for tensor in tensors_in(value):
            number: Any = getattr(tensor, "_number", None)
            if isinstance(number, str):  # the name of a parameter or a buffer
                self.trace.parts.setdefault(number, set()).add(self.part)
            elif self._is_known(tensor):
                for part in range(self._results[number][1] + 1, self.part + 1):
                    if number not in self.trace.crossing[part]:
                        self.trace.crossing[part].append(number)
            elif isinstance(tensor, FakeTensor):
                self._check_held(tensor, id(tensor) in direct and not inside)

    def _check_held(self, tensor: Tensor, is_direct: bool) -> None:
        """Refuse a tensor that a submodule of an earlier part leaves in an attribute.

        Args:
            tensor: a tensor that is no result of an event.
            is_direct: True if the enclosing code itself reads it, and not only an object that contains it.
        """
        held = self._held.get(id(tensor))
        part = held.part if held else 0 if self.part == 0 else None
        if part != self.part and is_direct and not held and self._is_transforming:
            raise ValueError(_refuse_transform(f"a tensor {[*tensor.shape]} that one has made"))
        if part != self.part and (is_direct or (held and held.attribute)):
            found = f"attribute {held.attribute!r}" if held and held.attribute else f"a tensor {[*tensor.shape]}"
            where = f"in stage {part}" if held else "in another way"
            raise ValueError(
                f"split_model: expected the code around the cuts to read in stage {self.part} what submodules return, "
                f"got {found}, which a submodule sets {where}; return it from that submodule, and pass it on as a value"
            )


def trace(traced: TracedModel, arguments: Any, device: torch.device | str, is_exact: bool = False) -> Trace:
    """Run a model with fake tensors. Neither saved-tensor hooks nor dispatch modes see the run.

    Args:
        traced: the model.
        arguments: pair of positional and keyword arguments, with TensorSpec in place of tensors.
        device: device of the arguments.
        is_exact: True to know draws of random numbers for sure, which is slow.

    Raises:
        ValueError: a cut is not called, or out of order; or the enclosing code does what stages cannot repeat.
        Exception: an error of the model with fake tensors, with a note that says so.
    """
    places = traced.enclosing_buffers()
    owners = {name: place for name, place in places.items() if place[0]._buffers[place[1]] is not None}
    buffers: dict[str, Any] = {name: module._buffers[key] for name, (module, key) in owners.items()}
    run = _TracingRun(traced, buffers, is_exact)
    args, kwargs = run.trace.arguments = _fake(arguments, traced.mode, device)
    run.number_all(run.trace.arguments, -1)
    for name, tensor in [*traced.model.named_parameters(), *traced.model.named_buffers()]:
        tensor._number = name  # pyright: ignore[reportAttributeAccessIssue]
    try:
        hooks = saved_tensors_hooks(_without_graph, lambda tensor: tensor)
        reads = AttributeReads(traced.whole, traced.enclosing)
        with reads, GlobalCaches(traced.model.modules()):
            with _disable_current_modes(), hooks, run.randomness, run:
                output = traced.model(*args, **kwargs)
                run.check_randomness("at its end")
                run.use(output)
                run.trace.output = pytree.tree_structure(output)
            reads.check(run.trace.parts)
        run.check_aliases()
        run.check_buffers({name: module._buffers[key] for name, (module, key) in owners.items()})
    except Exception as error:
        if isinstance(error, RuntimeError) and internals.is_hooks_refusal(error):
            raise ValueError(_refuse_transform("torch.func.grad or one that builds on it")) from error
        if not isinstance(error, ValueError) or not str(error).startswith(("cuts", "split_model")):
            error.add_note(
                "split_model runs the model once with tensors that have shapes and no elements, to learn which tensors "
                "cross a cut. If the code around the cuts depends on elements, cut the model by hand, into modules"
            )
        raise
    finally:
        for name, (module, key) in owners.items():
            module._buffers[key] = buffers[name]
    if run.part < len(traced.cuts):
        missing = traced.cuts[run.part]
        raise ValueError(f"cuts: expected submodules that forward calls, got {missing!r}, which it did not call")
    return trace(traced, arguments, device, is_exact=True) if run.randomness.is_unsure else run.trace


def _refuse_transform(found: str) -> str:
    """Return the message for transforms in the enclosing code."""
    return (
        "split_model: expected the code around the cuts to apply torch.vmap and transforms of torch.func to no "
        f"activation or parameter, got {found}; apply it in a submodule that one stage calls"
    )


def _has_transformed(value: Any) -> bool:
    """Return True for arguments inside of torch.vmap or torch.func, which wraps tensors so that no part knows them."""
    for leaf in pytree.tree_leaves(value):
        inner = leaf
        while isinstance(inner, Tensor) and internals.is_func_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)  # pyright: ignore[reportAttributeAccessIssue]
        if inner is not leaf and isinstance(inner, FakeTensor):
            return True
    return False


def _versions(value: Any) -> list[tuple[Tensor, int]]:
    """Return the fake tensors of a value, and their versions."""
    with torch._C.DisableTorchFunction():  # no event of the model
        found = [tensor for tensor in tensors_in(value) if isinstance(tensor, FakeTensor) and not tensor.is_inference()]
        return [(tensor, tensor._version) for tensor in found]


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
