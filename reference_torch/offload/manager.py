"""Who decides what is on the device: the layers of a window over the order of their uses, by
diptych/plans/offload.py."""

import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from diptych.plans.offload import Use, check_num_prefetch_layers
from reference_torch.offload.activations import ActivationGroup, ActivationOffload
from reference_torch.offload.layer import (
    OffloadedLayer,
    ShownLayers,
    check_new,
    close_layers,
    device_of,
)
from reference_torch.offload.lifetime import close_dropped, weak_method
from reference_torch.offload.link import Link
from reference_torch.offload.memory import OffloadedMemory
from reference_torch.offload.observe import LayerObserver
from reference_torch.offload.optimizer import OptimizerParts
from reference_torch.offload.order import UseOrder
from reference_torch.offload.report import ManagerReport
from reference_torch.offload.saved import guard_saved
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.recompute import internals


class TensorOffloadManager(ManagerReport):
    """Keeps most layers' parameters on the host, and brings each to the device in time for its use.

    Register the layers, then train as before::

        manager = TensorOffloadManager(num_prefetch_layers=1)
        for number, layer in enumerate(model.layers):
            manager.register_layer(number, layer)
        ...
        loss.backward()
        manager.step(optimizer)  # instead of optimizer.step(): layer by layer

    A layer is there while its forward runs and while its backward runs, with the next ``num_prefetch_layers`` in the
    order of uses; its gradients stay on the device, beside the optimizer's state. Whatever else reads a parameter
    brings its layer back first. What is not registered (embedding, final norm, head) stays. Keep the manager:
    deleting it closes it.

    Args:
        enabled: False: nothing is moved, and nothing registered.
        pin_memory: lock the host's copies in place; on a GPU.
        num_prefetch_layers: layers fetched ahead of the one in use; 0: each when it is used. As many as there are
            layers, or more: all stay.
        parameters: offload layers' parameters.
        activations: offload what layers keep for backward, but for the ``num_prefetch_layers + 1`` layers whose
            backwards come next.
        activation_min_bytes: what takes less stays.

    Raises:
        ValueError: num_prefetch_layers is negative.
    """

    _closed = True
    """Also before it is made, and where it could not be."""

    def __init__(
        self,
        enabled: bool = True,
        pin_memory: bool = True,
        num_prefetch_layers: int = 1,
        *,
        parameters: bool = True,
        activations: bool = False,
        activation_min_bytes: int = 2**20,
    ) -> None:
        check_num_prefetch_layers(num_prefetch_layers)
        self.enabled, self.pin_memory, self.num_prefetch_layers = enabled, pin_memory, num_prefetch_layers
        self.statistics = OffloadStatistics()
        self.trace: list[str] | None = None
        """Every move and use, where somebody makes it a list: ``+3`` fetched, ``F3`` used, ``-3`` evicted."""
        self._parameters, self._wants_activations = parameters, activations
        self._activation_min_bytes = activation_min_bytes
        self._activations: ActivationOffload | None = None
        self._link: Link | None = None
        self._layers: dict[int, OffloadedLayer] = {}
        self._memories: dict[int, OffloadedMemory] = {}
        self._order = UseOrder(num_prefetch_layers)
        self._open: dict[int, str] = {}
        self._task: int | None = None
        self._leaving: list[int] = []
        self._pinned: set[int] = set()
        self._shown = ShownLayers(self._layers, self._open)
        self._held: dict[int, OffloadedMemory] = {}
        """Memories that somebody else held when their layer last left."""
        self._closed = False

    def __del__(self) -> None:
        if not self._closed and not sys.is_finalizing():
            close_dropped(self, self._link)

    def register_layer(self, layer_id: int, module: nn.Module) -> None:
        """Offload a layer's parameters and buffers from now on; it stays on the device until another needs the room.

        What is kept on the device, since its memory is not the layer's own to give away: a view of part of a memory, a
        tensor subclass, a tensor without memory.

        Args:
            layer_id: its place in the order of forward; layers may be registered in any order.
            module: the layer, on its device.

        Raises:
            ValueError: the number or the module is registered already; its parameters lie on no device, or on another
                than the other layers'.
            OffloadError: the manager is closed; the host has no room. Nothing is registered then.
        """
        if not self.enabled:
            return
        self._check_open()
        check_new(layer_id, module, self._layers)
        link = self._link or Link(device_of(layer_id, module), self.pin_memory)
        device_of(layer_id, module, link.device)
        layer = OffloadedLayer(layer_id, module, self._memories, link, weak_method(self._expose), self._parameters)
        layer.observer = LayerObserver(layer_id, module, layer.own_parameters, self)
        layer.watch_state(weak_method(self.require), weak_method(self._settle), weak_method(self._end_failed))
        self._link = link
        if self._wants_activations and self._activations is None:
            record = weak_method(self._record)
            self._activations = ActivationOffload(link, self.statistics, self._activation_min_bytes, record)
        self._layers[layer_id] = layer
        self._memories.update({memory.home._cdata: memory for memory in layer.memories})
        self._order.add(layer_id)
        self._shown.show(layer_id)
        self._shown.hide_unused()
        self.statistics.note_bytes(self.device_bytes, len(self.resident_layers))

    def prefetch_layer(self, layer_id: int) -> None:
        """Begin to bring a layer to the device; nothing where it is there."""
        layer = self._layer(layer_id)
        moved = [memory.fetch() for memory in layer.memories]
        if not layer.is_here:
            layer.is_here = True
            self._record(f"+{layer_id}")
        self.statistics.note_copies("in", moved)
        self.statistics.note_bytes(self.device_bytes, len(self.resident_layers))

    def offload_layer(self, layer_id: int) -> None:
        """Let a layer go to the host; nothing where it is there already, or is used at the moment."""
        layer = self._layer(layer_id)
        if not layer.is_here or layer_id in self._open or layer_id in self._pinned:
            return
        layer.is_here = False
        shared = {id(m) for other in self._layers.values() if other.is_here for m in other.memories}
        moved = [self._let_leave(memory) for memory in layer.memories if id(memory) not in shared]
        self._leaving.append(layer_id)
        self._record(f"-{layer_id}")
        self.statistics.note_copies("out", moved)

    def prefetch_next_layers(self, current_layer_id: int) -> None:
        """Begin to bring what the uses after the present one need, as far as num_prefetch_layers reaches."""
        self._layer(current_layer_id)
        for layer_id in self._order.next_window()[: self.num_prefetch_layers]:
            self.prefetch_layer(layer_id)

    def on_forward_pre_hook(self, layer_id: int) -> None:
        """Before a layer's forward: it is there, and the next ones are on their way."""
        if not self.enabled:
            return
        if internals.runs_in_backward():
            self._replay(layer_id)
            return
        self._close_stale()
        self._order.training = torch.is_grad_enabled()
        self._begin(Use("F", layer_id))

    def on_forward_post_hook(self, layer_id: int) -> None:
        """After a layer's forward: it leaves, unless it is one of the next that are needed."""
        self._end(layer_id, ("F", "R"))

    def on_backward_pre_hook(self, layer_id: int) -> None:
        """A gradient of the layer's output has arrived: it is there again, and those before it are on their way."""
        if not self.enabled or self._closed:
            return
        self._end_with_backward()
        if torch.is_grad_enabled():  # create_graph: the gradients' own graph reads what no hook of ours announces
            self._pinned.add(layer_id)
        if self._order.expects_replay(layer_id):
            self._order.pending.append(layer_id)
        else:
            self._begin(Use("B", layer_id))

    def on_backward_post_hook(self, layer_id: int) -> None:
        """The gradients of the layer's inputs and parameters exist: it leaves."""
        if layer_id in self._order.pending:  # it gave way to a replay, and read nothing after that
            self._order.pending.remove(layer_id)
        self._end(layer_id, ("B",))

    def on_replay(self, parameters: list[Tensor]) -> None:
        """A recomputed region is about to be run again, and reads these; several layers announce themselves."""
        numbers = [number for number, layer in self._layers.items() if layer.has_any(parameters)]
        for number in numbers:
            self._layers[number].begin_replay()
        if len(numbers) == 1:
            self._replay(numbers[0])

    def set_link_delay(self, seconds: Callable[[int], float] | None) -> None:
        """Have every copy of so many bytes take longer, to see what a slow link does; None: as fast as it is."""
        if self._link is not None:
            self._link.delay = seconds

    def expect(self, uses: Iterable[Use]) -> None:
        """Say in which order layers will be used next, e.g. in a pipeline's step.

        What is used differs: the rest is forgotten, and the order of forward is followed, back in backward.
        """
        self._order.expect(uses)

    def offload_all_layers(self) -> None:
        """Let every layer go, e.g. before the first step."""
        for layer_id in self._order.layers:
            self.offload_layer(layer_id)
        self._finish_leaving()
        self.statistics.restart_peak(self.device_bytes, len(self.resident_layers))

    def require(self, layer_id: int) -> None:
        """Bring a layer back now, and wait for it; until the next use ends it is there."""
        if layer_id in self._order.pending:
            self._replay(layer_id)
            return
        layer = self._layer(layer_id)
        if not layer.is_here:
            self.statistics.note_use(layer_id, hit=False)
        self.prefetch_layer(layer_id)
        self._arrive(layer)

    def _expose(self, layer_id: int) -> None:
        """Somebody reads or writes a parameter whom no hook has announced."""
        self.require(layer_id)
        self._shown.show(layer_id)
        if layer_id not in self._open:
            self._layers[layer_id].note_change()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step: first of what is not offloaded, then layer by layer, each written back as it leaves.

        The optimizer must treat each parameter by itself, as PyTorch's do, all but LBFGS.
        """
        if not self.enabled or not self._layers:
            optimizer.step()
            return
        self._close_stale()
        self._pinned.clear()
        parts = OptimizerParts(optimizer, {n: self._layers[n].parameters for n in reversed(self._order.layers)})
        try:
            parts.step(None)
            for layer_id in self._order.layers:
                self._begin(Use("S", layer_id))
                parts.step(layer_id)
                self._layers[layer_id].note_change()
                self._end(layer_id, ("S",))
        finally:
            parts.join()

    def close(self) -> None:
        """Bring everything back and take every hook away; a second time does nothing.

        Raises:
            OffloadError: the device has no room for some of it, which can still be read and closed again.
        """
        if self._closed:
            return
        self._open.clear()
        close_layers(self._layers)
        self._closed = True
        self._memories.clear()
        self._held.clear()
        if self._activations is not None:
            self._activations.pool.clear()

    def saved_tensor_hooks(self, group: ActivationGroup | None) -> saved_tensors_hooks:
        """What a layer's forward runs in, so that no operation's backward reads what is away."""
        return guard_saved(self._memories, weak_method(self.require_memory), self._activations, group)

    def new_group(self) -> ActivationGroup | None:
        """What the forward that has begun keeps for backward; None: it keeps nothing that moves."""
        if self._activations is None or not torch.is_grad_enabled() or internals.runs_in_backward():
            return None
        return ActivationGroup(self._order.current, self._order.current in self._order.next_backwards())

    def end_group(self, group: ActivationGroup) -> None:
        """The forward has ended: what it keeps may leave."""
        if self._activations is not None:
            self._activations.leave(group)

    def require_memory(self, memory: OffloadedMemory) -> None:
        """As ``require``, of the layer that has the memory; of several, the one whose backward waits to begin."""
        if not memory.is_home or self._order.pending:
            owners = [number for number, layer in self._layers.items() if memory in layer.memories]
            waiting = [number for number in self._order.pending if number in owners]
            if waiting or not memory.is_home:
                self.require([*waiting, *owners][0])

    # How a use goes.

    def _begin(self, use: Use) -> None:
        layer = self._layer(use.layer)
        if self._open.get(use.layer) == use.kind:
            return
        for number in [number for number, kind in self._open.items() if kind == "R"]:
            self._end(number, ("R",))
        self._open[use.layer] = use.kind
        self.statistics.note_use(use.layer, hit=layer.is_here)
        window = self._order.begin(use)
        self._settle(window)
        self._finish_leaving()
        for layer_id in window:
            self.prefetch_layer(layer_id)
        if self._activations is not None and use.kind in ("B", "R"):
            replayed = (self._order.current._replace(kind="F"),)
            self._activations.fetch(replayed if use.kind == "R" else self._order.next_backwards(with_current=True))
        self._record(str(use))
        self._arrive(layer)
        self._shown.show(use.layer)
        self._shown.hide_unused()

    def _end(self, layer_id: int, kinds: tuple[str, ...]) -> None:
        if self._open.get(layer_id) not in kinds:
            return
        self._layers[layer_id].note_unseen_writes(self._open.pop(layer_id))
        self._shown.hide_unused()
        self._settle()

    def _let_leave(self, memory: OffloadedMemory) -> int:
        """Let a memory go, unless somebody else holds it; return the bytes copied."""
        moved = memory.leave()
        if memory.is_home:
            self._held[id(memory)] = memory
        else:
            self._held.pop(id(memory), None)
        return moved

    def _settle(self, keep: tuple[int, ...] | None = None) -> None:
        """Let go what is outside a window; None: outside that of the next uses."""
        keep = self._order.next_window() if keep is None else keep
        for other in [number for number in self.resident_layers if number not in keep]:
            self.offload_layer(other)

    def _replay(self, layer_id: int) -> None:
        """A layer's forward, or a part of it, runs again in backward."""
        self._layers[layer_id].run_again()
        if layer_id in self._order.pending:
            self._order.pending.remove(layer_id)
            self._begin(Use("B", layer_id))
            return
        if layer_id in self._open:
            return
        for number in [number for number, kind in self._open.items() if kind == "B"]:  # it waits for what is replayed
            self._layers[number].note_unseen_writes(self._open.pop(number))
            self._order.pending.append(number)
        self._begin(Use("R", layer_id))

    def _end_with_backward(self) -> None:
        """Have everything closed that is still open when the backward that is running ends."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._close_stale)  # pyright: ignore

    def _close_stale(self) -> None:
        """End uses that nobody has ended: parts of a graph that were not run, exceptions."""
        self._order.pending.clear()
        for layer in self._layers.values():
            if layer.observer is not None:
                layer.observer.backward = None
        for number, kind in list(self._open.items()):
            if not internals.runs_in_backward():  # it failed, and its layers were as any others since
                self._layers[number].note_change()
            self._end(number, (kind,))
        for layer in self._layers.values():
            layer.end_replay()

    def _end_failed(self) -> None:
        """End uses that an exception has left open, before somebody looks at what they have written."""
        running = (layer.observer is not None and layer.observer.is_running for layer in self._layers.values())
        if self._open and not internals.runs_in_backward() and not any(running):
            self._close_stale()

    def _arrive(self, layer: OffloadedLayer) -> None:
        if self._link is not None and not layer.is_home:
            with self.statistics.waiting(self._link.device):
                layer.arrive()

    def _finish_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for layer_id in leaving:
            self._layers[layer_id].finish_leaving()
