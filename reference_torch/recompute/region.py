"""One call that can be replayed, and the storages it can refill.

The call runs once, with gradients enabled, and its autograd graph is the real one. Hooks drop every value the
graph would keep; in their place stand handles that replay the call on first use. The call's inputs are kept by a
small autograd node, as any operation keeps its inputs, so version checks and outer hooks (offload, an outer
checkpoint) apply to them. Ownership runs from reader to what is read, never back: handles hold their region, a
region holds the slots its inputs come from, slots hold their region, and a region knows its own handles and slots
only weakly. So everything is freed by reference counting as backward passes.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from reference_torch.recompute import internals
from reference_torch.recompute.guards import (
    RecomputeMismatchError,
    RecomputeUsageError,
    empty_storage,
    mark_discarded,
    mark_restored,
    refill_storage,
)
from reference_torch.recompute.state import ReplayState

_slots: weakref.WeakValueDictionary[int, "Slot"] = weakref.WeakValueDictionary()
"""Slots by the address of their StorageImpl; a slot's weak reference keeps the address from being used again."""
_lock = threading.RLock()
"""Held while storages are refilled: CUDA runs backward on a thread a device."""
_thread = threading.local()


def slot_at(address: int | None) -> "Slot | None":
    """The slot of the StorageImpl at an address, if any."""
    return None if address is None else _slots.get(address)


def slot_of(tensor: Tensor) -> "Slot | None":
    """The slot whose storage a tensor uses, if any."""
    return slot_at(internals.storage_address(tensor))


def in_replay() -> bool:
    """Whether this code runs inside a replay, or inside any backward (an outer checkpoint's recompute)."""
    return getattr(_thread, "depth", 0) > 0 or internals.runs_in_backward()


@contextlib.contextmanager
def _replaying() -> Iterator[None]:
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1


class Slot:
    """One storage among a region's outputs, emptied after forward and refilled before its first reader."""

    def __init__(self, region: "Region", place: int, tensors: Sequence[Tensor]) -> None:
        storage = tensors[0].untyped_storage()
        self.region: Region | None = region
        self.place, self.is_full = place, True
        self.address, self.nbytes = storage._cdata, storage.nbytes()
        self._storage, self._version = StorageWeakRef(storage), tensors[0]._version
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self.event: torch.Event | None = None
        _slots[self.address] = self

    @property
    def is_alive(self) -> bool:
        """Whether anybody still holds the storage."""
        return not self._storage.expired()

    @property
    def tensors(self) -> list[Tensor]:
        """The outputs that share the storage, those still alive."""
        return [tensor for tensor in (reference() for reference in self._tensors) if tensor is not None]

    def discard(self) -> None:
        """Empty the storage; nothing inside a replay, where outputs are about to be read.

        Raises:
            RecomputeUsageError: an output was modified in place, which a replay could not repeat.
        """
        region = self.region
        if region is None or not self.is_alive or not self.is_full or region.is_nested or in_replay():
            return
        tensors = self.tensors
        if tensors and tensors[0]._version != self._version:
            raise RecomputeUsageError(
                f"output {self.place} of {region.name!r}: expected it as the call returned it, got it modified in "
                "place, which a replay cannot repeat; modify a copy, or inside the call"
            )
        empty_storage(internals.storage_from_weak(self._storage.cdata), region.name)
        self.is_full = False
        for tensor in tensors:
            mark_discarded(tensor, region.name, self._restore_in_replay)

    def keep(self) -> None:
        """The output stays for good: no replay is needed for its sake, and the call's inputs may go."""
        self.region = None
        _slots.pop(self.address, None)

    def refill(self, replayed: Tensor, recorded: dict[int, Tensor]) -> None:
        """Take over the memory of the replayed output.

        Args:
            replayed: the only reference to it.
            recorded: what the replayed graph keeps; values in the same memory are moved to this storage, or two
                copies would stay alive.
        """
        assert self.region is not None, "a slot that is kept was refilled"
        source = replayed.untyped_storage()
        if source.nbytes() != self.nbytes:
            raise RecomputeMismatchError(
                f"replay of {self.region.name!r}: expected output {self.place} to hold {self.nbytes} bytes as in "
                f"forward, got {source.nbytes()}"
            )
        aliases = {i: t for i, t in recorded.items() if slot_address(t) == source._cdata}
        storage = internals.storage_from_weak(self._storage.cdata)
        refill_storage(storage, source, is_held_only_by(source, [replayed, *aliases.values()]))
        for i, alias in aliases.items():
            shape, stride = alias.shape, alias.stride()
            empty = torch.empty(0, dtype=alias.dtype, device=alias.device)
            recorded[i] = empty.set_(storage, alias.storage_offset(), shape, stride)
        self.is_full, self.event = True, self.region.state.record_event(storage.device)
        for tensor in self.tensors:
            mark_restored(tensor)

    def restore(self) -> None:
        """Refill the storage if it is empty, and all it is computed from: nearest the input first, in a loop."""
        with _lock:
            waiting = [] if self.is_full or self.region is None else [self.region]
            while waiting:
                region = waiting[-1]
                empty = [] if region.is_restored else region.missing_inputs
                if empty:
                    waiting.extend(empty)
                else:
                    waiting.pop()
                    if not region.is_restored:
                        region.replay()
        if self.event is not None:  # a reader on another stream waits for the replay
            torch.cuda.current_stream(self.event.device).wait_event(self.event)  # pyright: ignore

    def _restore_in_replay(self) -> bool:
        if not in_replay():
            return False
        self.restore()
        return True


class _SaveInputs(torch.autograd.Function):
    """A node nobody runs backward through: it keeps a region's inputs."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("the node that keeps a region's inputs is not part of the loss")


class _Held:
    """What the graph keeps instead of a value: the region that can compute it, and which value it is."""

    __slots__ = ("__weakref__", "place", "region")

    def __init__(self, region: "Region", place: int) -> None:
        self.region, self.place = region, place


class Region:
    """A call, and all that is needed to make it again."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict, name: str, generators: Sequence) -> None:
        self.function, self.name, self.replays = function, name, 0
        leaves, self._structure = tree_flatten((args, kwargs))
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = [leaves[i] for i in self._places]
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._require_grad = [t.requires_grad for t in inputs]
        self._versions = [t._version for t in inputs]
        self.upstream = list({slot.address: slot for slot in map(slot_of, inputs) if slot is not None}.values())
        self.state = ReplayState(inputs, generators)
        self.is_nested = in_replay()
        self._handles: list[weakref.ref[_Held]] = []
        self._saved: list[tuple] = []
        self._recorded: dict[int, Tensor] = {}
        self._slots: list[weakref.ref[Slot]] = []
        self._output_layout: list[tuple | None] = []
        self.node = _SaveInputs.apply(torch.empty(0, requires_grad=True), *inputs).grad_fn  # pyright: ignore

    @property
    def is_restored(self) -> bool:
        """Whether no storage that anybody holds is empty."""
        slots = (reference() for reference in self._slots)
        return all(slot is None or slot.is_full or not slot.is_alive for slot in slots)

    @property
    def missing_inputs(self) -> list["Region"]:
        """The regions that must be replayed before this one."""
        return [slot.region for slot in self.upstream if not slot.is_full and slot.region is not None]

    def forward(self, args: tuple, kwargs: dict) -> Any:
        """Make the call, dropping what its graph would keep.

        Raises:
            RecomputeUsageError: it changes an input in place.
        """

        def drop(tensor: Tensor) -> _Held:
            handle = _Held(self, len(self._handles))
            self._handles.append(weakref.ref(handle))
            self._saved.append((tensor.shape, tensor.dtype, tensor.device))
            return handle

        with saved_tensors_hooks(drop, _compute_again):
            output = self.function(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if [t._version for t in inputs] != self._versions:
            raise RecomputeUsageError(
                f"{self.name!r}: expected a call that leaves its inputs as they are, got one that changes an input in "
                "place, which cannot be replayed; let it work on a copy"
            )
        self.state.forget_unused()
        return output

    def make_slots(self, outputs: list[Any]) -> tuple[list[Slot], list[str]]:
        """Slots for the outputs that may be discarded, and for each of the others why it is kept."""
        self._output_layout = [_layout(output) for output in outputs]
        groups: dict[int, list[tuple[int, Tensor]]] = {}
        for place, output in enumerate(outputs):
            if isinstance(output, Tensor) and output.layout is torch.strided and _has_memory(output):
                groups.setdefault(output.untyped_storage()._cdata, []).append((place, output))
        slots, kept = [], []
        for group in groups.values():
            place, tensors = group[0][0], [tensor for _, tensor in group]
            reason = self._reason_to_keep(tensors)
            if reason is None:
                slots.append(Slot(self, place, tensors))
            else:
                kept.append(f"output {place} of {self.name!r}: {reason}")
        self._slots = [weakref.ref(slot) for slot in slots]
        return slots, kept

    def _reason_to_keep(self, tensors: list[Tensor]) -> str | None:
        """Why outputs in one storage must stay: whoever else holds the memory would find it gone."""
        if any(type(tensor) is not Tensor for tensor in tensors):
            return "a tensor subclass"
        born = self.node._sequence_nr()

        def is_new(tensor: Tensor) -> bool:
            return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= born

        for tensor in tensors:
            if not is_new(tensor) or (tensor._base is not None and not is_new(tensor._base)):
                return "not computed by the call (an input, a parameter, a buffer), or needs no gradient"
        storage = tensors[0].untyped_storage()
        if not is_held_only_by(storage, tensors):
            return "its memory is held outside the call"
        return None

    def replay(self) -> None:
        """Make the call again: refill the outputs that are empty, record the values the graph still waits for.

        Raises:
            RecomputeMismatchError: it saves or returns something else than in forward.
            RecomputeUsageError: an input was modified in place since.
        """
        self.replays += 1
        args, kwargs = self._inputs()
        recorded: dict[int, Tensor] = {}
        count = 0

        def record(tensor: Tensor) -> None:
            nonlocal count
            expected = self._saved[count] if count < len(self._saved) else None
            if expected != (tensor.shape, tensor.dtype, tensor.device):
                raise RecomputeMismatchError(
                    f"replay of {self.name!r}: expected value {count} kept for backward to be {_words(expected)}, got "
                    f"{_words((tensor.shape, tensor.dtype, tensor.device))}; a recomputed call must do the same each "
                    "time"
                )
            if self._handles[count]() is not None:
                recorded[count] = tensor.detach()
            count += 1

        with self.state.entered(), _replaying(), torch.enable_grad(), saved_tensors_hooks(record, _no_second_graph):
            output = self.function(*args, **kwargs)
        del args, kwargs
        if count != len(self._saved):
            raise RecomputeMismatchError(
                f"replay of {self.name!r}: expected {len(self._saved)} values kept for backward, got {count}; a "
                "recomputed call must do the same each time"
            )
        outputs = [leaf.detach() if isinstance(leaf, Tensor) else None for leaf in tree_leaves(output)]
        del output
        self._refill(outputs, recorded)
        self._recorded.update(recorded)

    def _inputs(self) -> tuple[tuple, dict]:
        try:
            inputs = self.node.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        except RuntimeError as error:
            if isinstance(error, RecomputeUsageError) or "modified by an inplace operation" not in str(error):
                raise
            raise RecomputeUsageError(
                f"{self.name!r}: expected its inputs unchanged until its replay, got one modified in place: {error}"
            ) from error
        leaves = list(self._constants)
        for place, tensor, requires_grad in zip(self._places, inputs, self._require_grad, strict=True):
            leaves[place] = tensor.detach().requires_grad_(requires_grad)
        return tree_unflatten(leaves, self._structure)

    def _refill(self, outputs: list[Tensor | None], recorded: dict[int, Tensor]) -> None:
        layout = [_layout(output) for output in outputs]
        if layout != self._output_layout:
            raise RecomputeMismatchError(
                f"replay of {self.name!r}: expected outputs {self._output_layout} (shape, dtype, stride, offset) as in "
                f"forward, got {layout}"
            )
        for slot in filter(None, (reference() for reference in self._slots)):
            if slot.is_full or not slot.is_alive:
                continue
            replayed, outputs[slot.place] = outputs[slot.place], None
            assert replayed is not None, f"output {slot.place} of {self.name!r} was no tensor in its replay"
            address = slot_address(replayed)
            shared = [place for place, o in enumerate(outputs) if o is not None and slot_address(o) == address]
            for place in shared:
                outputs[place] = None
            slot.refill(replayed, recorded)


def _compute_again(handle: _Held) -> Tensor:
    region = handle.region
    with _lock:
        if handle.place not in region._recorded:
            for slot in region.upstream:
                slot.restore()
            region.replay()
        return region._recorded.pop(handle.place)


def _no_second_graph(_: Any) -> Tensor:
    raise AssertionError("backward ran through the graph of a replay")


def slot_address(tensor: Tensor) -> int:
    """Address of a tensor's StorageImpl."""
    return tensor.untyped_storage()._cdata


def is_held_only_by(storage: torch.UntypedStorage, tensors: list[Tensor]) -> bool:
    """Whether no tensor but those given, and the bases they are views of, uses the storage."""
    bases = [tensor._base for tensor in tensors if tensor._base is not None]  # alive, so that ids are theirs
    holders = {id(tensor) for tensor in [*tensors, *bases]}
    return internals.storage_holders(storage) <= len(holders) + 1


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _layout(output: Any) -> tuple | None:
    if not isinstance(output, Tensor) or output.layout is not torch.strided:
        return None
    return tuple(output.shape), output.dtype, output.stride(), output.storage_offset()


def _words(saved: tuple | None) -> str:
    return "nothing" if saved is None else f"{tuple(saved[0])} {saved[1]} on {saved[2]}"
