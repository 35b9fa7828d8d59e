"""When a layer is used: what hooks on a module and on its tensors tell of forward, backward and replays.

A gradient of a layer's output arrives before the layer's own gradients are computed, so it can only say that the
layer's backward begins. It has ended when the gradients of the layer's inputs exist, and those of its parameters.
"""

import weakref
from contextvars import Token
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from reference_torch.offload.activations import ActivationGroup
from reference_torch.offload.lifetime import weak_method
from reference_torch.offload.memory import gradient_node
from reference_torch.recompute import before_replay
from reference_torch.recompute.internals import outside_compiled_graphs


@runtime_checkable
class UseListener(Protocol):
    """The manager that an observer reports to."""

    def on_forward_pre_hook(self, layer_id: int) -> None:
        """A forward of the layer begins."""
        ...

    def on_forward_post_hook(self, layer_id: int) -> None:
        """A forward of the layer has ended."""
        ...

    def on_backward_pre_hook(self, layer_id: int) -> None:
        """A gradient of the layer's output has arrived."""
        ...

    def on_backward_post_hook(self, layer_id: int) -> None:
        """The gradients of the layer's inputs and parameters exist."""
        ...

    def on_replay(self, parameters: list[Tensor]) -> None:
        """A recomputed region that reads these parameters is about to run again."""
        ...

    def new_group(self) -> ActivationGroup | None:
        """Return the group for what the forward that begins saves for backward, or None."""
        ...

    def end_group(self, group: ActivationGroup) -> None:
        """The forward of the group has ended."""
        ...

    def saved_tensor_hooks(self, group: ActivationGroup | None) -> saved_tensors_hooks:
        """Return the hooks that the layer's forward runs in."""
        ...


class LayerObserver:
    """Tells a manager of every use of a module.

    Args:
        layer_id: what the listener calls it.
        module: the layer.
        parameters: whose gradients its backward waits for: its own, and nobody else's.
        listener: who is told.
    """

    def __init__(self, layer_id: int, module: nn.Module, parameters: list[nn.Parameter], listener: UseListener) -> None:
        self.layer_id, self._listener = layer_id, weakref.ref(listener)
        self.parameters, self._module = parameters, weakref.ref(module)
        self._on_replay = weak_method(listener.on_replay)
        self._watched: set[int] = set()
        """Places of the parameters whose gradients are waited for."""
        self._boundaries: weakref.WeakSet[_Boundary] = weakref.WeakSet()
        """Of leaves, which outlive the graphs they are in."""
        self._running: list[tuple[_Call, ActivationGroup | None, saved_tensors_hooks, Token]] = []
        self.backward: _Call | None = None
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        ]

    @property
    def listener(self) -> UseListener | None:
        """Who is told; None where nobody holds it any more, and it has closed."""
        return self._listener()

    @property
    def is_running(self) -> bool:
        """Whether a forward of the layer runs now."""
        return bool(self._running)

    def close(self) -> None:
        """Take every hook away."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for boundary in self._boundaries:
            boundary.forget(self)

    def __deepcopy__(self, memo: dict) -> "LayerObserver":
        return self  # a copied module takes the hooks along, and does not answer to them

    @outside_compiled_graphs
    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        listener = self.listener
        if module is not self._module() or listener is None:
            return
        listener.on_forward_pre_hook(self.layer_id)
        call = _Call(self)
        group = listener.new_group()
        if torch.is_grad_enabled():
            self._watch_parameters()
            for tensor in _with_gradient((args, kwargs)):
                call.inputs += 1
                boundary = _boundary(tensor)
                boundary.add_consumer(call)
                if tensor.is_leaf:
                    self._boundaries.add(boundary)
        hooks = listener.saved_tensor_hooks(group)
        hooks.__enter__()
        self._running.append((call, group, hooks, before_replay.set(self._on_replay)))

    @outside_compiled_graphs
    def _after_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Also where forward has raised, the call's own hooks before it included."""
        if not self._running or module is not self._module():
            return
        call, group, hooks, token = self._running.pop()
        before_replay.reset(token)
        hooks.__exit__(None, None, None)
        if torch.is_grad_enabled():
            for tensor in _with_gradient(output):
                _boundary(tensor).producers.append(call)
        listener = self.listener
        if listener is None:
            return
        listener.on_forward_post_hook(self.layer_id)
        if group is not None:
            listener.end_group(group)

    def _watch_parameters(self) -> None:
        """Also those that were frozen until now."""
        for place, parameter in enumerate(self.parameters):
            if parameter.requires_grad and place not in self._watched:
                self._watched.add(place)
                note = weak_method(self._note_gradient)  # the parameter must not hold what holds it
                self.handles.append(parameter.register_hook(lambda _, place=place, note=note: note(place)))

    def expected_gradients(self) -> set[int]:
        """Places of the parameters whose gradients the backward that is running comes to."""
        return {place for place in self._watched if _is_reached(gradient_node(self.parameters[place]))}

    def _note_gradient(self, place: int) -> None:
        if self.backward is not None:
            self.backward.missing.discard(place)
            self.backward.end_if_complete()


class _Call:
    """One forward call of a layer, and its backward."""

    def __init__(self, observer: LayerObserver) -> None:
        self.observer = observer
        self.inputs = 0
        self.inputs_left = 0
        self.missing: set[int] = set()
        """Places of the parameters whose gradients are still to come."""

    def begin(self) -> None:
        """A gradient of the output has arrived."""
        listener = self.observer.listener
        if self.observer.backward is self or listener is None:
            return
        self.observer.backward = self
        self.inputs_left = self.inputs
        self.missing = self.observer.expected_gradients()
        listener.on_backward_pre_hook(self.observer.layer_id)

    def input_done(self) -> None:
        """The gradient of one more input is there."""
        if self.observer.backward is self:
            self.inputs_left -= 1
            self.end_if_complete()

    def end_if_complete(self) -> None:
        """Tell, once, that everything this call computes is there."""
        if self.inputs_left <= 0 and not self.missing:
            self.observer.backward = None
            listener = self.observer.listener
            if listener is not None:
                listener.on_backward_post_hook(self.observer.layer_id)


class _Boundary:
    """Hook of a tensor between layers: its gradient ends backwards and begins others, in this order."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._handle = weakref.ref(tensor), tensor.register_hook(self)
        self._consumers: list[weakref.ref[_Call]] = []  # weak: an input may live longer than what is made of it
        self.producers: list[_Call] = []

    def add_consumer(self, call: _Call) -> None:
        """A call reads the tensor."""
        self._consumers = [reference for reference in self._consumers if reference() is not None]
        self._consumers.append(weakref.ref(call))

    def forget(self, observer: LayerObserver) -> None:
        """Leave the tensor where only calls of a layer that has closed were waiting for its gradient."""
        self._consumers = [r for r in self._consumers if (call := r()) is not None and call.observer is not observer]
        self.producers = [call for call in self.producers if call.observer is not observer]
        tensor = self._tensor()
        if tensor is not None and not self._consumers and not self.producers:
            self._handle.remove()
            vars(tensor).pop("_offload_boundary", None)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the tensor, also one on disk, is in no graph

    def __call__(self, gradient: Tensor) -> None:
        for call in filter(None, [reference() for reference in self._consumers]):
            call.input_done()
        for call in self.producers:
            call.begin()


def _boundary(tensor: Tensor) -> _Boundary:
    """A tensor's, made on first need."""
    found = vars(tensor).get("_offload_boundary")
    if found is None:
        found = vars(tensor)["_offload_boundary"] = _Boundary(tensor)
    return found


def _with_gradient(values: Any) -> list[Tensor]:
    """Every tensor of a nest that wants a gradient, once."""
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad)
    return list({id(tensor): tensor for tensor in found}.values())


def _is_reached(node: Node | None) -> bool:
    """Whether the backward that is running comes to a node; False where PyTorch does not say."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # torch.autograd.grad
        return False
