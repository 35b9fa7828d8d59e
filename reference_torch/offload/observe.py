"""Detection of a layer's uses (forward, backward, replay) by hooks on its module and tensors.

A layer's backward begins when a gradient of its output arrives. It has ended when the gradients of the layer's inputs
and parameters exist.
"""

import contextlib
import threading
import weakref
from contextvars import Token
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from reference_torch.offload.activations import ActivationGroup
from reference_torch.offload.interruptions import ObservedCall
from reference_torch.offload.lifetime import weak_method
from reference_torch.offload.link import OffloadError
from reference_torch.offload.storage import gradient_node
from reference_torch.offload.writes import UseHook
from reference_torch.recompute import before_replay, recorded_names
from reference_torch.recompute.internals import (
    is_differentiated_by_func_transform,
    outside_compiled_graphs,
    runs_in_backward,
)


@runtime_checkable
class UseListener(Protocol):
    """The manager that an observer reports to."""

    def on_forward_pre_hook(self, layer_id: int) -> None:
        """Handle the start of a forward of the layer."""
        ...

    def on_forward_post_hook(self, layer_id: int) -> None:
        """Handle the end of a forward of the layer."""
        ...

    def on_backward_pre_hook(self, layer_id: int) -> None:
        """Handle the arrival of a gradient of the layer's output."""
        ...

    def on_backward_post_hook(self, layer_id: int) -> None:
        """Handle the end of the layer's backward: the gradients of its inputs and parameters exist."""
        ...

    def on_replay(self, parameters: list[Tensor]) -> None:
        """Prepare for the replay of a recompute region that reads these parameters."""
        ...

    def new_group(self) -> ActivationGroup | None:
        """Return the group for tensors that the forward saves for backward, or None."""
        ...

    def end_group(self, group: ActivationGroup) -> None:
        """Handle the end of the forward of a group."""
        ...

    def saved_tensor_hooks(self, group: ActivationGroup | None) -> saved_tensors_hooks:
        """Return the hooks that the layer's forward runs in."""
        ...


class LayerObserver:
    """An observer that reports every use of a layer to a listener.

    Args:
        layer_id: number of the layer.
        module: the layer.
        parameters: parameters that no layer registered before shares; backward of the layer ends after their gradients.
        listener: receives the reports.
    """

    def __init__(self, layer_id: int, module: nn.Module, parameters: list[nn.Parameter], listener: UseListener) -> None:
        self.layer_id = layer_id
        self._listener = weakref.ref(listener)
        self.parameters = parameters
        self._module = weakref.ref(module)
        self._on_replay = weak_method(listener.on_replay)
        self._watched: set[int] = set()
        """Indices of the parameters that have a gradient hook."""
        self._leaf_hooks: weakref.WeakSet[_GradientHook] = weakref.WeakSet()
        """Hooks of leaf tensors, which outlive their graphs."""
        self._running: list[_RunningForward] = []
        self.thread: threading.Thread | None = None
        """Thread of the running forward; None also for a replay in backward."""
        self.backward: _Call | None = None
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        ]
        self._observed_call = ObservedCall(module, lambda: self.depth, self.end_forwards)

    @property
    def listener(self) -> UseListener | None:
        """The listener, or None after it is deleted."""
        return self._listener()

    @property
    def depth(self) -> int:
        """The number of forwards of the layer that run: one, or more if it calls itself."""
        return len(self._running)

    def close(self) -> None:
        """Remove every hook."""
        self._observed_call.undo()
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for hook in self._leaf_hooks:
            hook.forget(self)

    def __deepcopy__(self, memo: dict) -> "LayerObserver":
        return self  # the hooks of a copied module ignore it

    @outside_compiled_graphs
    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Report the start of a forward, and watch the tensors whose gradients end its backward."""
        listener = self.listener
        if module is not self._module() or listener is None:
            return
        if is_differentiated_by_func_transform():
            raise OffloadError(
                f"layer {self.layer_id}: expected plain autograd or vmap around an offloaded layer, got a torch.func "
                "derivative (grad, vjp, jvp ...), which does not support saved-tensor hooks; use torch.autograd.grad"
            )
        listener.on_forward_pre_hook(self.layer_id)
        call = _Call(self)
        group = listener.new_group()
        if torch.is_grad_enabled():
            self._watch_parameters()
            for tensor in _with_gradient((args, kwargs)):
                call.inputs += 1
                hook = _gradient_hook(tensor)
                hook.add_consumer(call)
                if tensor.is_leaf:
                    self._leaf_hooks.add(hook)
        with contextlib.ExitStack() as scope:
            if group is not None and group.values is not None and not group.stays_on_device:
                group.named = scope.enter_context(recorded_names())
            scope.enter_context(listener.saved_tensor_hooks(group))
            self._running.append(_RunningForward(call, group, scope.pop_all(), before_replay.set(self._on_replay)))
        self.thread = None if runs_in_backward() else threading.current_thread()

    @outside_compiled_graphs
    def _after_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """End the observation of a forward, also if the forward or one of its pre-hooks raised an error."""
        if not self._running or module is not self._module():
            return
        call, group, scope, token = self._running.pop()
        if not self._running:
            self.thread = None
        before_replay.reset(token)
        scope.close()
        if torch.is_grad_enabled():
            for tensor in _with_gradient(output):
                if not tensor.is_leaf:  # the layer has computed nothing whose gradient comes after that of a leaf
                    _gradient_hook(tensor).producers.append(call)
        listener = self.listener
        if listener is None:
            return
        listener.on_forward_post_hook(self.layer_id)
        if group is not None:
            listener.end_group(group)

    def end_forwards(self, depth: int) -> None:
        """End the observation of the forwards after which no hook has run, until ``depth`` are left."""
        module: Any = self._module()
        while len(self._running) > depth:
            with contextlib.suppress(Exception):  # the caller must see what has ended the forward
                self._after_forward(module, (), {}, None)

    def _watch_parameters(self) -> None:
        """Add gradient hooks to parameters without one, including those that were frozen before."""
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad and index not in self._watched:
                self._watched.add(index)
                note = weak_method(self._note_gradient)  # avoids a reference cycle
                self.handles.append(parameter.register_hook(UseHook(note, index)))

    def expected_gradients(self) -> set[int]:
        """Return the indices of the parameters whose gradients the running backward computes."""
        return {index for index in self._watched if _is_reached(gradient_node(self.parameters[index]))}

    def _note_gradient(self, index: int, _: Tensor | None) -> None:
        """Record that the gradient of a parameter exists."""
        if self.backward is not None:
            self.backward.missing.discard(index)
            self.backward.end_if_complete()


class _RunningForward(NamedTuple):
    """A forward that has begun, and what its end undoes."""

    call: "_Call"
    group: ActivationGroup | None
    scope: contextlib.ExitStack
    """The saved-tensor hooks, and the record of named values."""
    before_replay: Token
    """The former value of ``before_replay``."""


class _Call:
    """One forward call of a layer and its backward."""

    def __init__(self, observer: LayerObserver) -> None:
        self.observer = observer
        self.inputs = 0
        """Number of inputs that require a gradient."""
        self.inputs_left = 0
        """Inputs whose gradients are not computed yet."""
        self.missing: set[int] = set()
        """Indices of the parameters whose gradients are not computed yet."""

    def begin(self) -> None:
        """Begin the backward when a gradient of the output arrives."""
        listener = self.observer.listener
        if self.observer.backward is self or listener is None:
            return
        self.observer.backward = self
        self.inputs_left = self.inputs
        self.missing = self.observer.expected_gradients()
        listener.on_backward_pre_hook(self.observer.layer_id)

    def note_input_gradient(self) -> None:
        """Count the gradient of one input."""
        if self.observer.backward is self:
            self.inputs_left -= 1
            self.end_if_complete()

    def end_if_complete(self) -> None:
        """Report the end of the backward once all gradients of this call exist."""
        if self.inputs_left <= 0 and not self.missing:
            self.observer.backward = None
            listener = self.observer.listener
            if listener is not None:
                listener.on_backward_post_hook(self.observer.layer_id)


class _GradientHook:
    """A gradient hook on an input or output of a layer.

    The gradient first ends the backward of the layers that read the tensor, then begins that of its producers.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._handle = tensor.register_hook(self)
        self._consumers: list[weakref.ref[_Call]] = []  # weak, because an input may outlive the calls that read it
        self.producers: list[_Call] = []

    def add_consumer(self, call: _Call) -> None:
        """Add a call that reads the tensor."""
        self._consumers = [reference for reference in self._consumers if reference() is not None]
        self._consumers.append(weakref.ref(call))

    def forget(self, observer: LayerObserver) -> None:
        """Remove the calls of a closed layer, and the hook if no other call needs it."""
        self._consumers = [r for r in self._consumers if (call := r()) is not None and call.observer is not observer]
        self.producers = [call for call in self.producers if call.observer is not observer]
        tensor = self._tensor()
        if tensor is not None and not self._consumers and not self.producers:
            self._handle.remove()
            vars(tensor).pop("_offload_hook", None)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copied or saved tensor is in no graph

    def __call__(self, gradient: Tensor) -> None:
        for call in filter(None, [reference() for reference in self._consumers]):
            call.note_input_gradient()
        for call in self.producers:
            call.begin()


def _gradient_hook(tensor: Tensor) -> _GradientHook:
    """Return the hook of a tensor; create it on first use."""
    hook = vars(tensor).get("_offload_hook")
    if hook is None:
        hook = _GradientHook(tensor)
        vars(tensor)["_offload_hook"] = hook
    return hook


def _with_gradient(values: Any) -> list[Tensor]:
    """Return every tensor of a nested structure that requires a gradient, once."""
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad)
    return list({id(tensor): tensor for tensor in found}.values())


def _is_reached(node: Node | None) -> bool:
    """Return True if the running backward executes a node; False if PyTorch cannot tell."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # torch.autograd.grad
        return False
