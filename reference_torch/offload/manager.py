"""The offload manager, which keeps the layers of the next uses on the device.

``diptych/plans/offload.py`` defines the window of layers over the order of uses.
"""

import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from diptych.plans.offload import Use, check_num_prefetch_layers
from reference_torch.offload.activations import ActivationGroup, ActivationOffload
from reference_torch.offload.layer import (
    OffloadedLayer,
    UnguardedLayers,
    check_new,
    close_layers,
    device_of,
)
from reference_torch.offload.lifetime import close_dropped, weak_method
from reference_torch.offload.link import Link
from reference_torch.offload.memory import OffloadedMemory
from reference_torch.offload.observe import LayerObserver
from reference_torch.offload.optimizer import OptimizerParts, check_is_per_parameter
from reference_torch.offload.order import UseOrder
from reference_torch.offload.report import ManagerReport
from reference_torch.offload.saved import guard_saved
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.recompute import internals


class TensorOffloadManager(ManagerReport):
    """A manager that places most layers' parameters on the host and fetches each layer in time for its use.

    Register the layers, then train as before::

        manager = TensorOffloadManager(num_prefetch_layers=1)
        for number, layer in enumerate(model.layers):
            manager.register_layer(number, layer)
        ...
        loss.backward()
        manager.step(optimizer)  # instead of optimizer.step(): layer by layer

    A layer is on the device during its forward and its backward, together with the next ``num_prefetch_layers`` layers
    in the order of uses. Its gradients and the optimizer state stay on the device. Any other read of a parameter
    fetches its layer first. Unregistered modules (embedding, final norm, head) stay on the device. Keep a reference to
    the manager, because deleting it closes it.

    Args:
        enabled: if False, nothing is registered and nothing moves.
        pin_memory: place host copies in pinned memory; only on a GPU.
        num_prefetch_layers: number of layers fetched ahead of the one in use; 0: each layer is fetched when it is used.
            If it is at least the number of layers, all layers stay on the device.
        parameters: offload the parameters of layers.
        activations: offload the tensors that layers save for backward, except for the ``num_prefetch_layers + 1``
            layers whose backwards come next.
        activation_min_bytes: activations of fewer bytes stay on the device.

    Raises:
        ValueError: num_prefetch_layers is negative.
    """

    _closed = True
    """True before construction and after a failed construction, too."""

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
        self.enabled = enabled
        self.pin_memory = pin_memory
        self.num_prefetch_layers = num_prefetch_layers
        self.statistics = OffloadStatistics()
        self.trace: list[str] | None = None
        """A list of all moves and uses if the caller sets it to a list: ``+3`` fetched, ``F3`` used, ``-3`` evicted."""
        self._parameters = parameters
        self._wants_activations = activations
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
        self._unguarded = UnguardedLayers(self._layers, self._open)
        self._held: dict[int, OffloadedMemory] = {}
        """Memories with other holders when their layer was last evicted."""
        self._closed = False

    def __del__(self) -> None:
        if not self._closed and not sys.is_finalizing():
            close_dropped(self, self._link)

    def register_layer(self, layer_id: int, module: nn.Module) -> None:
        """Offload the parameters and buffers of a layer; the layer stays on the device until its first eviction.

        Tensors whose memory the layer does not own stay on the device: a view of part of a memory, a tensor subclass, a
        tensor without memory.

        Args:
            layer_id: position in the order of forward; layers may be registered in any order.
            module: the layer, on its device.

        Raises:
            ValueError: the number or the module is already registered, or its parameters are on an unsupported device
                or on another device than the other layers.
            OffloadError: the manager is closed, or the host has no free memory. The layer is not registered then.
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
        self._unguarded.unguard(layer_id)
        self._unguarded.guard_unused()
        self.statistics.note_bytes(self.device_bytes, len(self.resident_layers))

    def prefetch_layer(self, layer_id: int) -> None:
        """Start to copy a layer to the device, unless it is already there."""
        layer = self._layer(layer_id)
        moved = [memory.fetch() for memory in layer.memories]
        if not layer.is_resident:
            layer.is_resident = True
            self._record(f"+{layer_id}")
        self.statistics.note_copies("in", moved)
        self.statistics.note_bytes(self.device_bytes, len(self.resident_layers))

    def offload_layer(self, layer_id: int) -> None:
        """Evict a layer to the host, unless it is already there or in use."""
        layer = self._layer(layer_id)
        if not layer.is_resident or layer_id in self._open or layer_id in self._pinned:
            return
        layer.is_resident = False
        shared = {id(m) for other in self._layers.values() if other.is_resident for m in other.memories}
        moved = [self._evict(memory) for memory in layer.memories if id(memory) not in shared]
        self._leaving.append(layer_id)
        self._record(f"-{layer_id}")
        self.statistics.note_copies("out", moved)

    def prefetch_next_layers(self, current_layer_id: int) -> None:
        """Start to fetch the num_prefetch_layers layers that the next uses need."""
        self._layer(current_layer_id)
        for layer_id in self._order.next_window()[: self.num_prefetch_layers]:
            self.prefetch_layer(layer_id)

    def on_forward_pre_hook(self, layer_id: int) -> None:
        """Wait for a layer before its forward and prefetch the next layers."""
        if not self.enabled:
            return
        if internals.runs_in_backward():
            self._replay(layer_id)
            return
        self._close_stale()
        self._order.training = torch.is_grad_enabled()
        self._begin(Use("F", layer_id))

    def on_forward_post_hook(self, layer_id: int) -> None:
        """Evict a layer after its forward, unless one of the next uses needs it."""
        self._end(layer_id, ("F", "R"))

    def on_backward_pre_hook(self, layer_id: int) -> None:
        """Wait for a layer when a gradient of its output arrives, and prefetch the next layers of backward."""
        if not self.enabled or self._closed:
            return
        self._end_with_backward()
        if torch.is_grad_enabled():  # with create_graph, the graph of the gradients reads parameters without a hook
            self._pinned.add(layer_id)
        if self._order.expects_replay(layer_id):
            self._order.pending.append(layer_id)
        else:
            self._begin(Use("B", layer_id))

    def on_backward_post_hook(self, layer_id: int) -> None:
        """Evict a layer once the gradients of its inputs and parameters exist."""
        if layer_id in self._order.pending:  # it was interrupted by a replay and read nothing afterwards
            self._order.pending.remove(layer_id)
        self._end(layer_id, ("B",))

    def on_replay(self, parameters: list[Tensor]) -> None:
        """Fetch the layer whose parameters a recompute region reads in its replay.

        If the parameters belong to several layers, the hooks of those layers fetch them.
        """
        numbers = [number for number, layer in self._layers.items() if layer.has_any(parameters)]
        for number in numbers:
            self._layers[number].begin_replay()
        if len(numbers) == 1:
            self._replay(numbers[0])

    def set_link_delay(self, seconds: Callable[[int], float] | None) -> None:
        """Add seconds to every copy, to simulate a slow link.

        Args:
            seconds: returns the extra seconds of a copy from its number of bytes; None: no delay.
        """
        if self._link is not None:
            self._link.delay = seconds

    def expect(self, uses: Iterable[Use]) -> None:
        """Announce the order of the next uses, for example of a pipeline step.

        If a use differs from it, the rest is discarded. The manager then assumes the order of forward, and the reverse
        order in backward.

        Args:
            uses: the next uses.
        """
        self._order.expect(uses)

    def offload_all_layers(self) -> None:
        """Evict every layer, for example before the first step."""
        for layer_id in self._order.layers:
            self.offload_layer(layer_id)
        self._finish_leaving()
        self.statistics.restart_peak(self.device_bytes, len(self.resident_layers))

    def require(self, layer_id: int) -> None:
        """Fetch a layer and wait for it; it stays on the device until the next use ends."""
        if layer_id in self._order.pending:
            self._replay(layer_id)
            return
        layer = self._layer(layer_id)
        if not layer.is_resident:
            self.statistics.note_use(layer_id, hit=False)
        self.prefetch_layer(layer_id)
        self._arrive(layer)

    def _expose(self, layer_id: int) -> None:
        """Fetch a layer for a read or write of a parameter outside the layer's uses."""
        self.require(layer_id)
        self._unguarded.unguard(layer_id)
        if layer_id not in self._open:
            self._layers[layer_id].note_change()

    def step(self, optimizer: torch.optim.Optimizer, is_per_parameter: bool = False) -> None:
        """Run the optimizer step, first for parameters that are not offloaded, then layer by layer.

        Args:
            optimizer: updates each parameter independently, as all optimizers of PyTorch except LBFGS do.
            is_per_parameter: True for another optimizer, or one with step hooks, that does so too.

        Raises:
            OffloadError: the update of a parameter may depend on other parameters.
        """
        if not self.enabled or not self._layers:
            optimizer.step()
            return
        if not is_per_parameter:
            check_is_per_parameter(optimizer)
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
        """Move everything to the device and remove every hook; a second call does nothing.

        Raises:
            OffloadError: the device has no room for some layers, which stay readable; call close() again later.
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
        """Return the saved-tensor hooks of a layer's forward, which fetch parameters before backward reads them."""
        return guard_saved(self._memories, weak_method(self.require_memory), self._activations, group)

    def new_group(self) -> ActivationGroup | None:
        """Return the activation group of the forward that has started, or None if no activation moves."""
        if self._activations is None or not torch.is_grad_enabled() or internals.runs_in_backward():
            return None
        return ActivationGroup(self._order.current, self._order.current in self._order.next_backwards())

    def end_group(self, group: ActivationGroup) -> None:
        """Start to move the activations of a forward that has ended."""
        if self._activations is not None:
            self._activations.leave(group)

    def require_memory(self, memory: OffloadedMemory) -> None:
        """Fetch the layer that owns a memory and wait for it.

        If several layers share the memory, the layer whose backward is pending is fetched.
        """
        if not memory.is_on_device or self._order.pending:
            owners = [number for number, layer in self._layers.items() if memory in layer.memories]
            waiting = [number for number in self._order.pending if number in owners]
            if waiting or not memory.is_on_device:
                self.require([*waiting, *owners][0])

    # Begin and end of a use.

    def _begin(self, use: Use) -> None:
        layer = self._layer(use.layer)
        if self._open.get(use.layer) == use.kind:
            return
        for number in [number for number, kind in self._open.items() if kind == "R"]:
            self._end(number, ("R",))
        self._open[use.layer] = use.kind
        self.statistics.note_use(use.layer, hit=layer.is_resident)
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
        self._unguarded.unguard(use.layer)
        self._unguarded.guard_unused()

    def _end(self, layer_id: int, kinds: tuple[str, ...]) -> None:
        if self._open.get(layer_id) not in kinds:
            return
        self._layers[layer_id].note_unseen_writes(self._open.pop(layer_id))
        self._unguarded.guard_unused()
        self._settle()

    def _evict(self, memory: OffloadedMemory) -> int:
        """Evict a memory, unless it has other holders, and return the number of bytes copied."""
        moved = memory.leave()
        if memory.is_on_device:
            self._held[id(memory)] = memory
        else:
            self._held.pop(id(memory), None)
        return moved

    def _settle(self, window: tuple[int, ...] | None = None) -> None:
        """Evict the layers outside a window; None: the window of the next uses."""
        window = self._order.next_window() if window is None else window
        for other in [number for number in self.resident_layers if number not in window]:
            self.offload_layer(other)

    def _replay(self, layer_id: int) -> None:
        """Begin the replay of a layer's forward, or a part of it, in backward."""
        self._layers[layer_id].note_replay()
        if layer_id in self._order.pending:
            self._order.pending.remove(layer_id)
            self._begin(Use("B", layer_id))
            return
        if layer_id in self._open:
            return
        for number in [number for number, kind in self._open.items() if kind == "B"]:  # it waits for the replay
            self._layers[number].note_unseen_writes(self._open.pop(number))
            self._order.pending.append(number)
        self._begin(Use("R", layer_id))

    def _end_with_backward(self) -> None:
        """End all open uses when the running backward ends."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._close_stale)  # pyright: ignore

    def _close_stale(self) -> None:
        """End uses that are still open because a part of the graph did not run, or an exception was raised."""
        self._order.pending.clear()
        for layer in self._layers.values():
            if layer.observer is not None:
                layer.observer.backward = None
        for number, kind in list(self._open.items()):
            if not internals.runs_in_backward():  # the use failed, and its layer may have been written since
                self._layers[number].note_change()
            self._end(number, (kind,))
        for layer in self._layers.values():
            layer.end_replay()

    def _end_failed(self) -> None:
        """End uses that an exception left open, before their parameters are read."""
        running = (layer.observer is not None and layer.observer.is_running for layer in self._layers.values())
        if self._open and not internals.runs_in_backward() and not any(running):
            self._close_stale()

    def _arrive(self, layer: OffloadedLayer) -> None:
        if self._link is not None and not layer.is_on_device:
            with self.statistics.waiting(self._link.device):
                layer.arrive()

    def _finish_leaving(self) -> None:
        leaving = self._leaving
        self._leaving = []
        for layer_id in leaving:
            self._layers[layer_id].finish_leaving()
