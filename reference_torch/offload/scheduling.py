"""Scheduling: the order in which layers are used, and the fetches and evictions that each use causes.

``diptych/plans/offload`` defines the window of layers over the order of uses.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from diptych.plans.offload import Use, expected_uses, forwards_needed_next, next_layers
from reference_torch.offload.link import OffloadError
from reference_torch.offload.residency import Residency
from reference_torch.offload.storage import OffloadedStorage
from reference_torch.recompute import internals

LOOK_AHEAD = 4096
"""Number of predicted uses that are searched for the next backwards, because a prediction has no end."""


class UsePredictor:
    """A record of past uses and a forecast of the next uses.

    Args:
        num_prefetch_layers: number of layers that a window contains after the current one.
    """

    def __init__(self, num_prefetch_layers: int) -> None:
        self.layers: list[int] = []
        """Registered layers in the order of forward."""
        self.training = True
        """True if backward follows forward."""
        self._num_prefetch_layers = num_prefetch_layers
        self._current_forward: list[int] = []
        """Layers of the current forward so far."""
        self._expected: deque[Use] = deque()
        """Announced uses that have not begun."""
        self._last: Use | None = None
        self.pending: list[int] = []
        """Layers whose backward autograd has announced, and whose replay comes first. The backward begins or continues
        when it reads a parameter."""
        self._replays: dict[int, tuple[int, ...]] = {}
        """By layer, the layers that the last step replayed before the layer's backward."""
        self._replayed: list[int] = []
        """Layers replayed since the last use of another kind."""
        self.current = Use("S", -1)
        """The use that began last; its microbatch is known if uses were announced."""

    def expects_replay(self, layer_id: int) -> bool:
        """Return True if a replay comes before a layer's backward, as announced or as in the last step."""
        if self._expected:
            return self._expected[0].kind == "R"
        return layer_id in self._replays and not self._replayed

    def add(self, layer_id: int) -> None:
        """Add a registered layer, ordered by its number until a forward runs in another order."""
        self.layers = sorted([*self.layers, layer_id])

    def expect(self, uses: Iterable[Use]) -> None:
        """Announce the next uses."""
        self._expected = deque(uses)

    def begin(self, use: Use) -> tuple[int, ...]:
        """Begin a use and return the window: the layers to fetch, in the order in which they are needed."""
        self._last = use
        self.current = use
        self._record_replays(use)
        if not self._expected:
            self._record_forward_order(use)
        else:
            expected = self._expected.popleft()
            if expected[:2] == use[:2]:
                self.current = expected
            else:
                self._expected.clear()
        return self._window(chain([use], self._upcoming()))

    def forwards_needed_next(self, with_current: bool = False) -> tuple[Use, ...]:
        """Return the forwards whose backwards come next, as many as a window contains.

        Args:
            with_current: include the current use.
        """
        uses = chain([self.current] if with_current else [], islice(self._upcoming(), LOOK_AHEAD))
        return forwards_needed_next(uses, self._num_prefetch_layers + 1)

    def next_window(self) -> tuple[int, ...]:
        """Return the window of the uses after the last one."""
        return self._window(self._upcoming())

    def _upcoming(self) -> Iterator[Use]:
        """Return the announced uses, and after them those that the order of forward predicts."""
        last = self._expected[-1] if self._expected else self._last
        if last is None or last.layer not in self.layers:
            last = Use("S", self.layers[-1])
        replays = self._replays
        # If a replay has begun that no earlier step had, the layers before that of the last waiting backward follow.
        if last.kind == "R" and self.pending and self.pending[-1] not in replays:
            begin, end = (self.layers.index(layer) for layer in (last.layer, self.pending[-1]))
            replays = {**replays, self.pending[-1]: tuple(self.layers[begin:end]) or (last.layer,)}
        return chain(self._expected, expected_uses(self.layers, last, self.training, replays))

    def _window(self, uses: Iterable[Use]) -> tuple[int, ...]:
        """Return the next layers of some uses, as many as a window contains."""
        return next_layers(uses, min(self._num_prefetch_layers + 1, len(self.layers)))

    def _record_replays(self, use: Use) -> None:
        """Record which layers are replayed before which backward."""
        if use.kind == "R":
            self._replayed.append(use.layer)
            return
        if use.kind == "B":
            self._replays.pop(use.layer, None)
            if self._replayed:
                self._replays[use.layer] = tuple(dict.fromkeys(self._replayed))
        self._replayed = []

    def _record_forward_order(self, use: Use) -> None:
        """Record the order of the layers in forward."""
        if use.kind == "F" and use.layer not in self._current_forward:
            self._current_forward.append(use.layer)
            return
        if len(self._current_forward) > 1:
            self.layers = self._current_forward + [
                number for number in self.layers if number not in self._current_forward
            ]
        self._current_forward = [use.layer] if use.kind == "F" else []


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the scheduler, so that one thread at a time runs it."""

    @wraps(method)
    def locked(self: "UseScheduler", *args: Any, **options: Any) -> Any:
        with self._lock:
            return method(self, *args, **options)

    return locked


class UseScheduler:
    """The uses that have begun and not ended, and the window of layers that are on the device for the next uses.

    Args:
        residency: the layers.
        num_prefetch_layers: number of layers that the window contains after the current one.
    """

    def __init__(self, residency: Residency, num_prefetch_layers: int) -> None:
        self.order = UsePredictor(num_prefetch_layers)
        self._residency = residency
        self._open: dict[int, str] = {}
        """Kind of the open use of each layer in use."""
        self._until_step: set[int] = set()
        """Layers that stay on the device until the optimizer step."""
        self._graph_task_id: int | None = None
        """Number of the running call of backward; all uses end with it."""
        self._lock = threading.RLock()
        self._backward_thread: threading.Thread | None = None
        """Thread of the running call of backward."""

    @_locked
    def add(self, layer_id: int) -> None:
        """Add a registered layer."""
        self.order.add(layer_id)
        self._residency.unguard(layer_id)
        self._residency.guard_all_except(self._open)

    @_locked
    def begin(self, use: Use) -> None:
        """Fetch the layer of a use and wait for it, start to fetch the next layers, and evict the others."""
        residency = self._residency
        residency.layer(use.layer)  # raises an error if it is not registered
        if self._open.get(use.layer) == use.kind:
            return
        for number in [number for number, kind in self._open.items() if kind == "R"]:
            self.end(number, ("R",))  # a replay has no event that ends it
        self._open[use.layer] = use.kind
        residency.note_use(use.layer)  # before the fetch below
        window = self.order.begin(use)
        # Evictions come before fetches, which reuse their device memory. Here the computation waits for the copies to
        # the host that the end of the previous use has begun. It waits for the copies of gradients at the next use.
        if residency.gradients is not None:
            residency.gradients.evict_arrived()
        self.evict_unneeded(window)
        residency.finish_eviction()
        for layer_id in window:
            residency.fetch(layer_id)
        # After the parameters, which this use waits for first; the link copies in order.
        if residency.activations is not None and use.kind in ("B", "R"):
            replayed = (self.order.current._replace(kind="F"),)
            residency.activations.fetch(
                replayed if use.kind == "R" else self.order.forwards_needed_next(with_current=True)
            )
        residency.record(str(use))
        residency.wait_for_fetch(use.layer)  # once the other copies have begun, which go on during the use
        residency.unguard(use.layer)
        residency.guard_all_except(self._open)

    @_locked
    def end(self, layer_id: int, kinds: tuple[str, ...]) -> None:
        """End a layer's use if it is of one of these kinds, and evict what the next uses do not need."""
        if self._open.get(layer_id) not in kinds:
            return
        self._residency.layers[layer_id].note_untracked_writes(self._open.pop(layer_id))
        self._residency.guard_all_except(self._open)
        self.evict_unneeded()

    @_locked
    def begin_forward(self, layer_id: int) -> None:
        """Begin a forward, which is a replay if it runs in backward."""
        if internals.runs_in_backward():
            self.replay(layer_id)
            return
        self._check_thread()
        self.end_all()
        self.order.training = torch.is_grad_enabled()
        self.begin(Use("F", layer_id))

    @_locked
    def begin_backward(self, layer_id: int) -> None:
        """Begin a backward, or postpone it until its replay has begun and reads the layer."""
        self._check_thread()
        self._end_with_backward()
        if torch.is_grad_enabled():  # with create_graph, the graph of the gradients reads parameters without a hook
            self._until_step.add(layer_id)
        if self.order.expects_replay(layer_id):
            self.order.pending.append(layer_id)
        else:
            self.begin(Use("B", layer_id))

    @_locked
    def end_backward(self, layer_id: int) -> None:
        """End a backward."""
        if layer_id in self.order.pending:  # it was interrupted by a replay and read nothing afterwards
            self.order.pending.remove(layer_id)
        self.end(layer_id, ("B",))

    @_locked
    def begin_steps(self) -> None:
        """End all other uses before the optimizer step."""
        self.end_all()
        self._until_step.clear()

    def replay(self, layer_id: int) -> None:
        """Begin the replay of a layer's forward, or a part of it, in backward."""
        self._residency.layers[layer_id].note_replay()
        if layer_id in self.order.pending:
            self.order.pending.remove(layer_id)
            self.begin(Use("B", layer_id))
            return
        if layer_id in self._open:
            return
        for number in [number for number, kind in self._open.items() if kind == "B"]:  # it waits for the replay
            self._residency.layers[number].note_untracked_writes(self._open.pop(number))
            self.order.pending.append(number)
        self.begin(Use("R", layer_id))

    @_locked
    def replay_owner(self, parameters: list[Tensor]) -> None:
        """Begin the replay of the layer whose parameters a recompute region reads.

        If the parameters belong to several layers, the hooks of those layers fetch them.
        """
        layers = self._residency.layers
        numbers = [number for number, layer in layers.items() if layer.has_any(parameters)]
        for number in numbers:
            layers[number].begin_replay()
        if len(numbers) == 1:
            self.replay(numbers[0])

    @_locked
    def fetch(self, layer_id: int) -> None:
        """Start to copy a layer to the device, unless it is already there."""
        self._residency.fetch(layer_id)

    @_locked
    def evict(self, layer_id: int) -> None:
        """Evict a layer, unless it is in use or stays until the optimizer step."""
        self._residency.layer(layer_id)
        if layer_id not in self._open and layer_id not in self._until_step:
            self._residency.evict(layer_id)

    @_locked
    def evict_unneeded(self, window: tuple[int, ...] | None = None) -> None:
        """Evict the layers outside a window; None: the window of the next uses."""
        window = self.order.next_window() if window is None else window
        for other in [number for number in self._residency.resident_layers if number not in window]:
            self.evict(other)

    @_locked
    def require(self, layer_id: int) -> None:
        """Fetch a layer and wait for it; it stays on the device until the next use ends."""
        if layer_id in self.order.pending:
            self.replay(layer_id)
            return
        if not self._residency.layer(layer_id).is_resident:
            self._residency.note_use(layer_id)
        self._residency.fetch(layer_id)
        self._residency.wait_for_fetch(layer_id)

    @_locked
    def require_storage(self, storage: OffloadedStorage) -> None:
        """Fetch the layer that owns a storage and wait for it.

        If several layers share the storage, the layer whose backward is pending is fetched.
        """
        if not storage.is_on_device or self.order.pending:
            owners = self._residency.owners(storage)
            pending = [number for number in self.order.pending if number in owners]
            if pending or not storage.is_on_device:
                self.require([*pending, *owners][0])

    @_locked
    def fetch_for_access(self, layer_id: int) -> None:
        """Fetch a layer for a read or write of a parameter outside the layer's uses."""
        self._check_thread()
        self.require(layer_id)
        self._residency.unguard(layer_id)
        if layer_id not in self._open:
            self._residency.layers[layer_id].note_change()

    @_locked
    def end_all(self) -> None:
        """End uses that are still open because a part of the graph did not run, or an exception was raised."""
        self.order.pending.clear()
        layers = self._residency.layers
        for layer in layers.values():
            if layer.observer is not None:
                layer.observer.backward = None
        for number, kind in list(self._open.items()):
            if not internals.runs_in_backward():  # the use failed, and its layer may have been written since
                layers[number].note_change()
            self.end(number, (kind,))
        for layer in layers.values():
            layer.end_replay()

    @_locked
    def end_failed(self) -> None:
        """End uses that an exception left open, before their parameters are read."""
        self._check_thread()
        layers = self._residency.layers.values()
        running = (layer.observer is not None and layer.observer.depth > 0 for layer in layers)
        if self._open and not internals.runs_in_backward() and not any(running):
            self.end_all()

    @_locked
    def forget_open(self) -> None:
        """Forget all open uses, because the manager is closed."""
        self._open.clear()

    def _end_with_backward(self) -> None:
        """End all open uses when the running backward ends."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._graph_task_id):
            self._graph_task_id = task
            self._backward_thread = threading.current_thread()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backwards)  # pyright: ignore

    @_locked
    def _end_backwards(self) -> None:
        """End all uses when a call of backward has ended."""
        self._backward_thread = None
        if self._residency.gradients is not None:
            self._residency.gradients.evict_arrived()
        self.end_all()

    def _check_thread(self) -> None:
        """Check that no other thread is in a forward or a backward, since its end would evict what both read.

        PyTorch runs backwards of a GPU in threads of its own, which are not compared.

        Raises:
            OffloadError: another thread is in a forward or a backward.
        """
        current = threading.current_thread()
        if self._backward_thread is current and not internals.runs_in_backward():
            self._backward_thread = None  # an error has ended it
        running = {layer.observer.thread for layer in self._residency.layers.values() if layer.observer is not None}
        others = [
            thread
            for thread in {self._backward_thread, *running} - {current}
            if thread is not None and thread.is_alive() and not isinstance(thread, threading._DummyThread)
        ]
        if others and not isinstance(current, threading._DummyThread):
            raise OffloadError(
                f"offload: expected one thread at a time, got {current.name} while {others[0].name} is in a forward or "
                "a backward of an offloaded layer; wait for it, or give each thread a copy of the model"
            )
