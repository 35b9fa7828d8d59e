"""A model cut into pipeline stages at the calls of named submodules, without changes to its code.

Each stage is a shallow copy of the model and of the submodules that enclose the cuts. Their forwards run on every
stage, but only the operations of the stage are computed (partial_forward.py). All other submodules are whole: a stage
owns those that it calls, and has no parameters of the others. Names of parameters stay those of the model.
"""

import copy
import copyreg
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from reference_torch.pipeline.nested_values import containers_copied, contents, tensors_in
from reference_torch.pipeline.partial_forward import PartEnd, PartialRun, Trace, current_run
from reference_torch.pipeline.payloads import TreeSpec, flatten
from reference_torch.pipeline.shared_parameters import find_shared
from reference_torch.pipeline.traced_forward import TracedModel, trace
from reference_torch.wrapped_forward import WrappedForward, rebound


def split_model(
    model: nn.Module,
    cuts: Sequence[str],
    example_args: Sequence[Any] | None = None,
    example_kwargs: dict[str, Any] | None = None,
) -> list[nn.Module]:
    """Cut a model into stages.

    The first stage takes the arguments of the model; the output of each stage is the argument of the next one, and the
    last one returns the output of the model. The stages share parameters with the model and use its names, so a
    checkpoint of the model can be loaded into them. They can be wrapped by DistributedDataParallel or fully_shard, and
    their submodules can be compiled, checkpointed, or given to recompute_modules, before or after the split. Stages can
    be deep-copied together, and are saved by their state_dict, not by pickle. A buffer that the code around the cuts
    changes is in the state_dict of the stage that changes it.

    Args:
        model: the model.
        cuts: dotted names of submodules, in the order in which the model calls them; a stage begins at each of them.
        example_args: positional arguments of the model, whose shapes decide which stage owns which submodule. None,
            and no example_kwargs: the order of registration decides, and the first forward checks it.
        example_kwargs: keyword arguments of the model.

    Returns:
        One stage more than cuts.

    Raises:
        ValueError: the whole model has hooks; a cut is not a submodule, or is not called in the given order; or a
            buffer that the code around the cuts changes is used by two stages. The first forward raises these if there
            are no example arguments.
    """
    _check_cuts(model, cuts)
    tracer = _Tracer(model, [*cuts])
    has_example = example_args is not None or example_kwargs is not None
    owners = {name: {part} for name, part in tracer.parts_by_registration(checked=not has_example).items()}
    if has_example:
        spec = flatten((tuple(example_args or ()), example_kwargs or {}), 0).spec
        tracer.has_example = True
        owners |= tracer.owners(tracer.trace(spec, model.training, _device(model)))
    stages = [_stage(model, tracer, part, owners) for part in range(len(cuts) + 1)]
    shared = find_shared(stages)
    for stage in stages:
        stage.shared_parameters = shared
    return stages


def _check_cuts(model: nn.Module, cuts: Sequence[str]) -> None:
    """Check that cuts are different submodules of a model with plain parameters."""
    hooks = {
        "forward hook": model._forward_hooks,
        "forward pre-hook": model._forward_pre_hooks,
        "backward hook": model._backward_hooks,
        "backward pre-hook": model._backward_pre_hooks,
    }
    if named := [kind for kind, installed in hooks.items() if installed]:
        raise ValueError(
            f"model: expected no hooks on the whole model, which no stage is, got a {named[0]}; register it on a "
            "submodule, or after the split on a stage"
        )
    if isinstance(cuts, str) or not cuts:
        raise ValueError(f"cuts: expected a list of names of submodules, at which stages begin, got {cuts!r}")
    names = [name for name, _ in model.named_modules() if name]
    for name in cuts:
        if name not in names:
            raise ValueError(f"cuts: expected names of submodules, such as {', '.join(names[:5])}, got {name!r}")
    if len({*cuts}) < len(cuts):
        raise ValueError(f"cuts: expected different submodules, got {[*cuts]}")
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise ValueError(
                f"model: expected plain parameters, got a {type(parameter).__name__} {name!r}; split the model first, "
                "then wrap the stages"
            )


MAX_TRACES = 16
"""Traces that a model stores, for different shapes of its arguments."""


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _enclosing(model: nn.Module, cuts: Sequence[str]) -> set[str]:
    """Return the names of the submodules that enclose a cut, and of the containers of submodules in them."""
    parents = [name.split(".")[:-1] for name in cuts]
    names = {".".join(path[:end]) for path in parents for end in range(len(path) + 1)}
    for name, module in model.named_modules():
        if isinstance(module, _CONTAINERS) and name.rpartition(".")[0] in names:
            names.add(name)  # it has no forward: the enclosing code calls or reads what it contains
    return names


def _check_one_name(model: nn.Module, enclosing: Collection[str]) -> None:
    """Check that the code around the cuts has each submodule under one name."""
    names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name.rpartition(".")[0] not in enclosing or not name:
            continue
        first = names.setdefault(id(module), name)
        if first != name:
            raise ValueError(
                f"model: expected each submodule around the cuts under one name, got {first!r} and {name!r} for the "
                "same one; register and call it by one name"
            )


class _Tracer:
    """The model with fake parameters, and its traces by structure of the arguments.

    Args:
        model: the model.
        cuts: submodules at which stages begin.
    """

    def __init__(self, model: nn.Module, cuts: list[str]) -> None:
        self._cuts = cuts
        self.enclosing = _enclosing(model, cuts)
        """Names of the submodules that enclose a cut; "" is the model."""
        _check_one_name(model, self.enclosing)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.no_grad():
            fakes: dict[int, Any] = {
                id(tensor): self._mode.from_tensor(tensor.detach())
                for tensor in [*model.parameters(), *model.buffers()]
            }
        for parameter in model.parameters():
            fakes[id(parameter)] = nn.Parameter(fakes[id(parameter)], parameter.requires_grad)
        fakes |= {id(tensor): self._mode.from_tensor(tensor.detach()) for tensor in _computed(model)}
        self.model = copy.deepcopy(model, fakes)
        """A copy that computes nothing and needs no memory for parameters."""
        self.has_example = False
        """True if example arguments decide which stage owns which submodule."""
        for name, module in self.watched(self.model):
            module.__class__ = _watched(type(module), name, _Enclosing if name in self.enclosing else _Whole, cuts)
        self._traces: dict[tuple[Any, ...], Trace] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Tracer":
        """Return the tracer itself: copies of stages compute what the stages do."""
        return self

    @property
    def fake_tensors(self) -> list[Tensor]:
        """The parameters and buffers of the fake model."""
        return [*self.model.parameters(), *self.model.buffers()]

    def enclosing_buffers(self, model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
        """Return the buffers of the enclosing submodules: by name, the submodule and the name there."""
        modules = [(name, module) for name, module in self.watched(model) if name in self.enclosing]
        return {f"{name}.{key}".lstrip("."): (module, key) for name, module in modules for key in module._buffers}

    def watched(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the enclosing submodules and their whole children, in order of registration."""
        return [
            (name, module)
            for name, module in model.named_modules()
            if name in self.enclosing or name.rpartition(".")[0] in self.enclosing
        ]

    def parts_by_registration(self, checked: bool) -> dict[str, int]:
        """Return the part of every watched submodule and parameter if the model calls them in order of registration.

        Args:
            checked: refuse cuts in another order.
        """
        part = 0
        parts = {}
        for name, module in self.watched(self.model):
            if name in self._cuts:
                if checked and name != self._cuts[part]:
                    raise ValueError(
                        f"cuts: expected submodules in order, got {self._cuts[part]!r} before {name!r}, which is "
                        "registered earlier; change their order, or give example_args if the model calls them so"
                    )
                part += 1
            parts[name] = part
            if name in self.enclosing:
                direct = module.named_parameters(name, recurse=False)
                parts.update({parameter: part for parameter, _ in direct})
        return parts

    def trace(self, spec: TreeSpec, training: bool, device: torch.device) -> Trace:
        """Return the trace for arguments of a structure."""
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        key = spec, training, torch.is_grad_enabled(), autocast, str(device)
        if key not in self._traces:
            if self.model.training != training:
                self.model.train(training)
            if len(self._traces) >= MAX_TRACES:
                self._traces.pop(next(iter(self._traces)))
            watched = self.watched(self.model)
            enclosing = {name: module for name, module in watched if name in self.enclosing}
            whole = {name: module for name, module in watched if name not in self.enclosing}
            traced = TracedModel(self.model, self._cuts, self._mode, enclosing, whole)
            self._traces[key] = trace(traced, spec.with_specs(), device)
        return self._traces[key]

    def owners(self, traced: Trace) -> dict[str, set[int]]:
        """Return the parts of submodules, parameters and buffers, by name.

        A submodule that is not called belongs to the parts whose enclosing code reads its parameters.
        """
        found = dict(traced.parts)
        for name, _ in self.watched(self.model):
            readers = [parts for key, parts in traced.parts.items() if key.startswith(f"{name}.")]
            if name not in self.enclosing and name not in found and readers:
                found[name] = set[int]().union(*readers)
        return found


class _Whole:
    """A submodule that is computed in one part or not at all."""

    _watched_name: str
    _watched_cuts: list[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        run = current_run()
        if run is None:
            return call(*args, **kwargs)
        if self._watched_name in self._watched_cuts:
            run.begin_part(self._watched_name)
        if "_stage_is_absent" in self.__dict__ and isinstance(run, PartialRun) and run.is_computing:
            has_example = run.has_example
            raise ValueError(
                f"split_model: expected submodule {self._watched_name!r} in stage {run.part}, which calls it, got it "
                f"in another by the {'example_args' if has_example else 'order of registration'}; "
                f"{'split the model again, with' if has_example else 'give split_model'} example_args"
                f"{' with which its code takes the same path' if has_example else ''}"
            )
        return run.submodule(self._watched_name, call, args, kwargs)


class _Enclosing:
    """A submodule whose code runs on every stage, because a cut is in it."""

    contains_cut = True
    _watched_name: str
    _watched_cuts: list[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is not None and self._watched_name in self._watched_cuts:
            run.begin_part(self._watched_name)
        forward = self.__dict__.get("forward")
        if run is not None and isinstance(forward, WrappedForward) and not forward.is_divisible:
            raise ValueError(
                f"split_model: expected a technique on submodules that are whole in one stage, got it on "
                f"{self._watched_name!r}, in which a cut is; name submodules of it instead"
            )
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class _Stage:
    """The model as one of its stages."""

    _stage_tracer: _Tracer
    _stage_part: int
    _own_forward: Callable[..., Any] | None = None
    """The forward that other code has set on this instance of the model."""
    shared_parameters: list[dict[int, str]]
    """Parameters that several stages share, each as a dict from stage to name."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the stage, in which the parameters of other stages are the same fake tensors."""
        memo |= {id(fake): fake for fake in self._stage_tracer.fake_tensors}
        if hasattr(super(), "__deepcopy__"):
            return super().__deepcopy__(memo)  # pyright: ignore[reportAttributeAccessIssue]
        reduced: Any = self.__reduce_ex__(4)  # as copy.deepcopy does
        make, arguments, state, *_ = reduced
        copied = make(*arguments)
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a stage: the first takes the arguments of the model, later ones the output of the previous stage."""
        if self._stage_part == 0:
            tree = flatten((args, kwargs), 0)
            spec = tree.spec
            tensors = tree.tensors
        else:
            tensors, spec = args
        training = self.training  # pyright: ignore[reportAttributeAccessIssue]
        traced = self._stage_tracer.trace(spec, training, tensors[0].device)
        of_arguments = [(-1, place) for place in range(len(tensors))]
        numbers = traced.crossing[self._stage_part] if self._stage_part else of_arguments
        received = dict(zip(numbers, tensors, strict=True))
        run = PartialRun(traced, self._stage_part, received, self._stage_tracer.has_example)
        if self._stage_part > 0:
            args, kwargs = run.arguments()
        try:
            with _own_buffers(self, traced), run:
                output = (self._own_forward or super().forward)(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
            run.check_output(output)
            return output
        except PartEnd:
            return [run.tensors[number] for number in traced.crossing[self._stage_part + 1]], spec


@contextmanager
def _own_buffers(stage: Any, traced: Trace) -> Iterator[None]:
    """Restore, at the end, the buffers that only the enclosing code of another stage changes."""
    changed = [name for name, part in traced.changed_buffers.items() if part != stage._stage_part]
    buffers = stage._stage_tracer.enclosing_buffers(stage) if changed else {}
    others = [buffers[name] for name in changed]
    before = [(module, name, module._buffers[name]) for module, name in others]
    for module, name in others:  # a checkpoint has it from the stage that changes it
        module._non_persistent_buffers_set = {*module._non_persistent_buffers_set, name}
    try:
        yield
    finally:
        for module, name, buffer in before:
            module._buffers[name] = buffer


def _watched(base: type, name: str, kind: type, cuts: list[str]) -> type:
    """Return a class of submodules that take part in runs."""
    return _make_class(base, kind, _watched_name=name, _watched_cuts=cuts)


def _make_class(base: type, kind: type, **attributes: Any) -> type:
    """Return a subclass of the class of a module, with its name, that can be deep-copied and refuses to be pickled."""
    return _made_by(type(base))(base.__name__, (kind, base), attributes | {"__module__": base.__module__})


@cache
def _made_by(metaclass: type) -> type:
    """Return a subclass of a metaclass whose classes pickle refuses by name."""
    made = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(made, _refuse_pickle)
    return made


def _refuse_pickle(made: Any) -> NoReturn:
    raise TypeError(
        f"split_model: expected a stage to be saved by its state_dict(), got pickle ({made.__name__}); save "
        "stage.state_dict(), whose names are those of the model, and split the model again after loading"
    )


def _stage(model: nn.Module, tracer: _Tracer, part: int, owners: Mapping[str, set[int]]) -> Any:
    """Return one stage of a model."""
    fakes = dict(tracer.watched(tracer.model))
    whole = [module for name, module in tracer.watched(model) if name not in tracer.enclosing]
    inner = [vars(module) for each in whole for module in each.modules()]
    memo = {id(value): value for each in inner for value in contents(each, 0).values()}  # these stay shared

    def build(name: str, module: nn.Module) -> nn.Module:
        if name not in tracer.enclosing:
            own = [key for key, parts in owners.items() if part in parts]
            read = {key.removeprefix(f"{name}.") for key in own if key.startswith(f"{name}.")}
            return _whole(module, fakes[name], part in owners[name] or not _state(module), read)
        copied = _shallow_copy(module, type(fakes[name]), memo)
        for child, submodule in module._modules.items():
            if submodule is not None:
                copied._modules[child] = build(f"{name}.{child}".lstrip("."), submodule)
        for parameter in module._parameters:
            if module._parameters[parameter] is not None and part not in owners[f"{name}.{parameter}".lstrip(".")]:
                del copied._parameters[parameter]
                copied.__dict__[parameter] = fakes[name]._parameters[parameter]
        return copied

    stage: Any = build("", model)
    stage.__class__ = _make_class(type(stage), _Stage)
    if "forward" in stage.__dict__ and not isinstance(stage.__dict__["forward"], WrappedForward):
        stage.__dict__["_own_forward"] = stage.__dict__.pop("forward")  # _Stage.forward calls it
    stage.__dict__["_stage_tracer"] = tracer
    stage.__dict__["_stage_part"] = part
    return stage


def _whole(module: nn.Module, fake: nn.Module, owned: bool, read: set[str]) -> nn.Module:
    """Return a submodule that shares all with the model's if owned; else one with only the parameters that are read.

    Args:
        module: the submodule of the model.
        fake: the same submodule with fake parameters.
        owned: True if the stage calls it.
        read: parameters and buffers of it that the enclosing code of the stage reads.
    """
    if owned:
        same = object.__new__(type(fake))
        same.__dict__ = module.__dict__
        return same
    absent = _without_parameters(module, fake, read)
    absent.__dict__["_stage_is_absent"] = True
    return absent


def _without_parameters(module: nn.Module, fake: nn.Module, read: set[str]) -> Any:
    """Return a submodule with fake parameters as attributes, except for those that are read."""
    absent = _shallow_copy(fake, type(fake), {})
    for registry in ("_parameters", "_buffers"):
        for name, value in getattr(fake, registry).items():
            if name in read:
                getattr(absent, registry)[name] = getattr(module, registry)[name]
            else:
                absent.__dict__[name] = value
                del getattr(absent, registry)[name]
    for name, value in fake._modules.items():
        inner = {key.partition(".")[2] for key in read if key.startswith(f"{name}.")}
        if inner and value is not None:
            absent._modules[name] = _without_parameters(module.get_submodule(name), value, inner)
        elif value is None or _state(value):  # a container of others without parameters counts them
            absent.__dict__[name] = absent._modules.pop(name)
    return absent


def _computed(model: nn.Module) -> list[Tensor]:
    """Return the tensors in attributes that have a graph, such as a weight that torch.nn.utils.weight_norm computes."""
    values = [value for module in model.modules() for name, value in vars(module).items() if name not in _REGISTRIES]
    return [tensor for value in values for tensor in tensors_in(value) if not tensor.is_leaf]


_REGISTRIES = ("_parameters", "_buffers", "_modules", "forward")


def _shallow_copy(module: nn.Module, kind: type, shared: dict[int, Any]) -> Any:
    """Return a copy with the same parameters, buffers, submodules, hooks and attributes, in containers of its own.

    Args:
        module: the module.
        kind: class of the copy.
        shared: containers that the copies of a stage share, by the id of the original.
    """
    copied = object.__new__(kind)
    copied.__dict__ = {name: containers_copied(value, shared) for name, value in module.__dict__.items()}
    if "forward" in copied.__dict__:  # of recompute_modules, or a method of this instance
        copied.__dict__["forward"] = rebound(copied.__dict__["forward"], module, copied)
    return copied


def _state(module: nn.Module) -> list[Any]:
    """Return the parameters and state_dict names of a submodule; one without any is on every stage."""
    return [*module.parameters(), *module.state_dict()]


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
