"""A call that can be replayed, and the storages that its replay refills.

A ``Region`` runs its call once with gradients enabled and keeps that autograd graph. Saved-tensor hooks replace every
value that the graph would save with a handle, which replays the call on first use. A small autograd node saves the
inputs of the call as any operation does, so version checks and outer hooks (offload, an outer checkpoint) apply to
them. A ``Slot`` is one storage among the outputs. It is emptied after forward and refilled by a replay.

A reader owns the object that it reads, never the reverse: handles hold their region, a region holds the slots of its
inputs, slots hold their region, and a region has only weak references to its own handles and slots. Reference counting
therefore frees everything as backward proceeds.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from reference_torch.recompute import internals
from reference_torch.recompute.guard_memory import reset_guard_memory
from reference_torch.recompute.guards import (
    RecomputeMismatchError,
    RecomputeUsageError,
    empty_storage,
    mark_discarded,
    mark_restored,
    refill_storage,
)
from reference_torch.recompute.operations import OperationRecorder
from reference_torch.recompute.state import ReplayState

before_replay: ContextVar[Callable[[list[Tensor]], None] | None] = ContextVar("before_replay", default=None)
"""A callback that regions created now call before each replay, with the parameters that the replay reads."""
_slots: weakref.WeakValueDictionary[int, "Slot"] = weakref.WeakValueDictionary()
"""Slots by the address of their StorageImpl; the weak reference of a slot prevents reuse of the address."""
_thread = threading.local()
Watches = Sequence[tuple[Tensor, int]]
"""Tensors that count the changes of a storage, with their versions after the call."""


def slot_at(address: int | None) -> "Slot | None":
    """Return the slot of the StorageImpl at an address, if any."""
    return None if address is None else _slots.get(address)


def slot_of(tensor: Tensor) -> "Slot | None":
    """Return the slot whose storage a tensor uses, if any."""
    return slot_at(internals.storage_address(tensor))


def in_replay() -> bool:
    """Return True inside a replay, and inside any backward, where an outer checkpoint may replay this code."""
    return getattr(_thread, "depth", 0) > 0 or internals.runs_in_backward()


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Make in_replay() return True in this context."""
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1


_CAUSE = "was a module switched between train() and eval(), or called by functional_call, which takes its tensors back?"


class Slot:
    """A storage among the outputs of a region, emptied after forward and refilled before its first reader."""

    def __init__(self, region: "Region", place: int, tensors: Sequence[Tensor]) -> None:
        storage = tensors[0].untyped_storage()
        self.region: Region | None = region
        self.place = place
        self.is_full = True
        self.address = storage._cdata
        self.nbytes = storage.nbytes()
        self._storage = StorageWeakRef(storage)
        self.watches: Watches = [(watch, watch._version) for watch in map(internals.version_watch, tensors)]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._aliases: list[weakref.ref[Tensor]] = []
        self._replayers: list[weakref.ref[Region]] = []
        self.event: torch.Event | None = None
        _slots[self.address] = self

    @property
    def is_alive(self) -> bool:
        """True while any tensor uses the storage."""
        return not self._storage.expired()

    @property
    def tensors(self) -> list[Tensor]:
        """The outputs that share the storage and are still alive."""
        return [tensor for tensor in (reference() for reference in self._tensors) if tensor is not None]

    def note_replayer(self, region: "Region") -> None:
        """Record a region that saved an output as its input, and so restores the output before it reads."""
        self._replayers.append(weakref.ref(region))

    def alias(self, tensor: Tensor) -> Tensor:
        """Return the tensor, detached, for a reader that calls restore() before it reads."""
        alias = tensor.detach()
        self._aliases.append(weakref.ref(alias))
        return alias

    def discard(self, force: bool = False) -> None:
        """Empty the storage, except inside a replay, whose outputs are read next.

        Args:
            force: if True, empty the storage even if a holder of its memory cannot restore it before reading.

        Raises:
            RecomputeUsageError: an output was modified in place, which a replay could not repeat.
        """
        region = self.region
        if region is None or not self.is_alive or not self.is_full or region.is_nested or in_replay():
            return
        tensors = self.tensors
        self._check_unchanged("before its discard")
        storage = internals.storage_from_weak(self._storage.cdata)
        aliases = [alias for alias in (reference() for reference in self._aliases) if alias is not None]
        replayers = sum(reference() is not None for reference in self._replayers)
        all_readers_restore = _times_saved(tensors) <= replayers and is_held_only_by(storage, [*tensors, *aliases])
        if not force and not all_readers_restore:
            return
        message = f"the output of recompute region {region.name!r} was read before it was restored"
        empty_storage(storage, f"DiscardedActivationError: {message}")
        self.is_full = False
        for tensor in tensors:
            mark_discarded(tensor, region.name, self._restore_in_replay)

    def _check_unchanged(self, when: str) -> None:
        """Check the version counters, which record a change even after the Python objects of the output are gone."""
        if self.is_changed:
            name = self.region.name if self.region is not None else ""
            raise RecomputeUsageError(
                f"output {self.place} of {name!r}: expected it as the call returned it, got it modified in place "
                f"{when}, which a replay cannot repeat; modify a copy, or inside the call"
            )

    @property
    def is_changed(self) -> bool:
        """True if an output, a view or an alias of it was modified in place since the call."""
        return _is_any_changed(self.watches)

    def live_with_outputs(self) -> None:
        """Keep this slot alive as long as the graph of any of its outputs, and so of every view of them."""
        for tensor in self.tensors:
            assert tensor.grad_fn is not None, "an output without a graph has no slot"
            tensor.grad_fn.metadata[self] = None  # pyright: ignore[reportIndexIssue]

    def keep(self) -> None:
        """Make the output permanent and release the region, since no replay is needed for it."""
        self.region = None
        _slots.pop(self.address, None)

    def refill(self, replayed: Tensor, aliases: list[Tensor]) -> list[Tensor]:
        """Take over the memory of the replayed output.

        Args:
            replayed: the replayed output; the caller holds no other reference to it.
            aliases: saved values of the replayed graph in the same memory.

        Returns:
            The aliases as views of this storage, so that only one copy stays alive.
        """
        assert self.region is not None, "a permanent slot was refilled"
        if self.is_changed:
            reset_guard_memory(replayed.device)
        self._check_unchanged("while it was empty")
        source = replayed.untyped_storage()
        if source.nbytes() != self.nbytes:
            raise RecomputeMismatchError(
                f"replay of {self.region.name!r}: expected output {self.place} to hold {self.nbytes} bytes as in "
                f"forward, got {source.nbytes()}"
            )
        storage = internals.storage_from_weak(self._storage.cdata)
        refill_storage(storage, source, is_held_only_by(source, [replayed, *aliases]))
        rebound = [_rebound(alias, storage) for alias in aliases]
        self.is_full = True
        self.event = self.region.state.record_event(storage.device)
        for tensor in self.tensors:
            mark_restored(tensor)
        return rebound

    def restore(self) -> None:
        """Refill the storage if it is empty, after the empty storages that its replay reads.

        A loop replays the regions from the input onwards, so that long chains do not recurse.
        """
        waiting = [] if self.is_full or self.region is None else [self.region]
        while waiting:
            region = waiting[-1]
            empty = [] if region.is_restored else region.missing_inputs
            if empty:
                waiting.extend(empty)
                continue
            waiting.pop()
            with region.lock:  # another thread may have replayed it
                if not region.is_restored:
                    region.replay()
        if self.event is not None:  # a reader on another stream waits for the replay
            torch.cuda.current_stream(self.event.device).wait_event(self.event)  # pyright: ignore

    def _restore_in_replay(self) -> bool:
        """Restore the storage and return True if a replay runs; otherwise return False."""
        if not in_replay():
            return False
        self.restore()
        return True


def _is_any_changed(watches: Watches) -> bool:
    return any(watch._version != version for watch, version in watches)


def _rebound(alias: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a view of another storage with the shape, strides, dtype, conjugation and sign of ``alias``."""
    view = torch.empty(0, dtype=alias.dtype, device=alias.device)
    view.set_(storage, alias.storage_offset(), alias.shape, alias.stride())  # pyright: ignore[reportCallIssue, reportArgumentType]
    if alias.is_conj():
        view = view.conj()
    return internals.negated_view(view) if alias.is_neg() else view


def slot_address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's StorageImpl, or None if it has none (sparse)."""
    return internals.storage_address(tensor)


def is_held_only_by(storage: torch.UntypedStorage, tensors: list[Tensor]) -> bool:
    """Return True if only the given tensors, and the bases that they are views of, use the storage."""
    bases = _bases(tensors)  # holds them, so that their ids stay valid
    holders = {id(tensor) for tensor in [*tensors, *bases]}
    return internals.storage_holders(storage) <= len(holders) + 1


def _times_saved(tensors: list[Tensor]) -> int:
    """Return how often operations without saved-tensor hooks have saved the tensors."""
    return sum(internals.tensor_holders(tensor) - 1 for tensor in tensors) - len(_bases(tensors))


def _bases(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor._base for tensor in tensors if tensor._base is not None]


class _SaveInputs(torch.autograd.Function):
    """An autograd node that saves the inputs of a region; backward never runs through it."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("the node that saves a region's inputs is not part of the loss")


class _Handle:
    """A stand-in for a saved value: the region that can compute it and the value's index."""

    __slots__ = ("__weakref__", "place", "region")

    def __init__(self, region: "Region", place: int) -> None:
        self.region = region
        self.place = place


class _Recorded(NamedTuple):
    """A value computed by a replay and not yet read."""

    tensor: Tensor
    version: int
    watches: Watches = ()
    """The watches of the output whose memory the value shares. Its slot would be a reference cycle with the region."""

    def take(self, name: str) -> Tensor:
        """Return the value.

        Args:
            name: name of the region, for error messages.

        Raises:
            RecomputeUsageError: the value was modified in place after the operation had saved it.
        """
        if _is_any_changed(self.watches) or self.tensor._version != self.version:
            raise RecomputeUsageError(
                f"{name!r}: expected values saved for backward unchanged, got one modified in place (one of the "
                f"variables needed for gradient computation is at version {self.tensor._version}; expected version "
                f"{self.version}); clone it before it is changed"
            )
        return self.tensor


class Region:
    """A call with everything that its replay needs."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict, name: str, generators: Sequence) -> None:
        self.function = function
        self.name = name
        self.replays = 0
        leaves, self._structure = _flattened(args, kwargs)
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = [leaves[i] for i in self._places]
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._require_grad = [t.requires_grad for t in inputs]
        first = {id(tensor): number for number, tensor in reversed([*enumerate(inputs)])}
        self._same_as = [first[id(tensor)] for tensor in inputs]
        """Number of the first input that is the same object, which functions such as attention(x, x, x) look at."""
        self._versions = [t._version for t in inputs]
        self._forward_inputs = inputs
        """The inputs until forward ends."""
        slots = [slot for slot in map(slot_of, inputs) if slot is not None]
        self.upstream = list({slot.address: slot for slot in slots}.values())
        if internals.outer_saved_tensor_hooks() is None:  # otherwise the hooks hold aliases of the inputs
            for slot in slots:
                slot.note_replayer(self)
        self.state = ReplayState(inputs, generators)
        self.is_nested = in_replay()
        self.lock = threading.RLock()
        """Lock held during a replay: on CUDA, backward runs on one thread for each device."""
        self._operations = OperationRecorder(inputs, self.state.note_draw)
        self.has_returned = False
        """True after the call of forward has returned."""
        self._handles: list[weakref.ref[_Handle]] = []
        self._saved: list[tuple] = []
        self._recorded: dict[int, _Recorded] = {}
        self._parameters: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._before_replay = before_replay.get()
        self._slots: list[weakref.ref[Slot]] = []
        self._output_layout: list[tuple | None] = []
        self._inputs_saved: Tensor = _SaveInputs.apply(torch.empty(0, requires_grad=True), *inputs)  # pyright: ignore
        """An empty tensor that keeps ``node`` valid: before PyTorch 2.13, a node ends with its tensors."""
        self.node: Any = self._inputs_saved.grad_fn

    @property
    def is_restored(self) -> bool:
        """True if no output storage that is still in use is empty."""
        slots = (reference() for reference in self._slots)
        return all(slot is None or slot.is_full or not slot.is_alive for slot in slots)

    @property
    def missing_inputs(self) -> list["Region"]:
        """Regions that must be replayed before this one."""
        return [slot.region for slot in self.upstream if not slot.is_full and slot.region is not None]

    def forward(self, args: tuple, kwargs: dict) -> Any:
        """Run the call and drop the values that its graph would save.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            The result of the call.

        Raises:
            RecomputeUsageError: the call changes an input in place.
        """
        inputs = self._forward_inputs
        self._forward_inputs = []
        input_ids = {id(tensor) for tensor in inputs}

        def drop(tensor: Tensor) -> _Handle:
            owner = tensor if tensor._base is None else tensor._base
            if owner.is_leaf and owner.requires_grad and id(owner) not in input_ids:
                self._parameters[id(owner)] = weakref.ref(owner), owner._version
            handle = _Handle(self, len(self._handles))
            self._handles.append(weakref.ref(handle))
            self._saved.append((tensor.shape, tensor.dtype, tensor.device))
            return handle

        try:
            with self._operations, saved_tensors_hooks(drop, _replayed_value):
                output = self.function(*args, **kwargs)
        except RuntimeError as error:
            if not internals.is_hooks_refusal(error):
                raise
            raise RecomputeUsageError(
                f"{self.name!r}: expected a call without torch.func transforms, got one that uses them, and they do "
                "not support the saved-tensor hooks of recompute; take the transform out of the call"
            ) from error
        self.has_returned = True
        if [tensor._version for tensor in inputs] != self._versions:
            raise RecomputeUsageError(
                f"{self.name!r}: expected a call that leaves its inputs as they are, got one that changes an input in "
                "place, which cannot be replayed; let it work on a copy"
            )
        module = self.function if isinstance(self.function, nn.Module) else getattr(self.function, "__self__", None)
        if isinstance(module, nn.Module):  # autograd does not save a bias, or a weight that autocast casts
            for parameter in module.parameters():
                self._parameters[id(parameter)] = weakref.ref(parameter), parameter._version
        self.state.note_flags(reference for reference, _ in self._parameters.values())
        self.state.forget_unused()
        return output

    def make_slots(self, outputs: list[Any]) -> tuple[list[Slot], list[str]]:
        """Return slots for the outputs that may be discarded, and the reason for each output that stays.

        Args:
            outputs: leaves of the call's result.
        """
        self._output_layout = [_layout(output) for output in outputs]
        groups: dict[int, list[tuple[int, Tensor]]] = {}
        for place, output in enumerate(outputs):
            if isinstance(output, Tensor) and output.layout is torch.strided and _has_memory(output):
                groups.setdefault(output.untyped_storage()._cdata, []).append((place, output))
        slots = []
        retained = []
        for group in groups.values():
            place = group[0][0]
            tensors = [tensor for _, tensor in group]
            reason = self._reason_to_retain(tensors)
            if reason is None:
                slots.append(Slot(self, place, tensors))
            else:
                retained.append(f"output {place} of {self.name!r}: {reason}")
        self._slots = [weakref.ref(slot) for slot in slots]
        return slots, retained

    def _reason_to_retain(self, tensors: list[Tensor]) -> str | None:
        """Return why the outputs in one storage must stay, or None if they may be discarded."""
        if any(type(tensor) is not Tensor for tensor in tensors):
            return "a tensor subclass"
        first_node = self.node._sequence_nr()

        def is_new(tensor: Tensor) -> bool:
            return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= first_node

        for tensor in tensors:
            if not is_new(tensor) or (tensor._base is not None and not is_new(tensor._base)):
                return "not computed by the call (an input, a parameter, a buffer), or needs no gradient"
        storage = tensors[0].untyped_storage()
        if not is_held_only_by(storage, tensors):
            return "its memory is held outside the call"
        return None

    def replay(self) -> None:
        """Replay the call, refill its empty outputs, and record the values that the graph still needs.

        Raises:
            RecomputeMismatchError: the replay saves or returns other values than the forward.
            RecomputeUsageError: an input was modified in place since the forward.
        """
        self.replays += 1
        if self._before_replay is not None:
            read = [reference() for reference, _ in self._parameters.values()]
            self._before_replay([parameter for parameter in read if parameter is not None])
        args, kwargs, inputs = self._inputs()
        operations = OperationRecorder(inputs)
        recorded: dict[int, _Recorded] = {}
        count = 0

        def mismatch(expected: str, actual: str) -> RecomputeMismatchError:
            difference = self._operations.difference(operations, whole=False)
            return RecomputeMismatchError(
                f"replay of {self.name!r}: expected {expected}, got {actual}; a recomputed call must do the same each "
                f"time ({f'{difference}; ' if difference else ''}{_CAUSE})"
            )

        def record(tensor: Tensor) -> None:
            nonlocal count
            expected = self._saved[count] if count < len(self._saved) else None
            if expected != (tensor.shape, tensor.dtype, tensor.device):
                actual = _words((tensor.shape, tensor.dtype, tensor.device))
                raise mismatch(f"value {count} saved for backward to be {_words(expected)}", actual)
            if self._handles[count]() is not None:
                # A tensor made from a number has no graph and cannot be detached under a dispatch mode.
                value = tensor if tensor.grad_fn is None else tensor.detach()
                recorded[count] = _Recorded(value, tensor._version)
            count += 1

        hooks = saved_tensors_hooks(record, _no_second_graph)
        with self.state.entered(), replaying(), torch.enable_grad(), operations, hooks:
            output = self.function(*args, **kwargs)
        del args, kwargs, inputs
        if count != len(self._saved):
            raise mismatch(f"{len(self._saved)} values saved for backward", str(count))
        outputs = [leaf.detach() if isinstance(leaf, Tensor) else None for leaf in internals.leaves_of(output)]
        del output
        layout = [_layout(output) for output in outputs]
        if layout != self._output_layout:
            expected = f"outputs {self._output_layout} (shape, dtype, stride, offset, conjugation, sign) as in forward"
            raise mismatch(expected, str(layout))
        difference = self._operations.difference(operations)
        if difference is not None:
            raise RecomputeMismatchError(
                f"replay of {self.name!r}: expected the operations and values of its forward, but {difference}; pass "
                "what changes as an argument, change it after backward, and let a module update its own state outside "
                f"the call ({_CAUSE})"
            )
        with self.state.on_streams():  # PyTorch 2.11 copies the outputs
            self._refill(outputs, recorded)
        self._recorded.update(recorded)

    def _inputs(self) -> tuple[tuple, dict, list[Tensor]]:
        """Return the arguments of a replay and the tensors among them, after a check that inputs are unchanged."""
        for reference, version in self._parameters.values():
            parameter = reference()
            if parameter is not None and parameter._version != version:
                raise RecomputeUsageError(
                    f"{self.name!r}: expected its parameters unchanged until its replay, got one of shape "
                    f"{tuple(parameter.shape)} modified in place; step the optimizer after backward"
                )
        try:
            inputs = self.node.saved_tensors
        except RuntimeError as error:
            if isinstance(error, RecomputeUsageError) or "modified by an inplace operation" not in str(error):
                raise
            raise RecomputeUsageError(
                f"{self.name!r}: expected its inputs unchanged until its replay, got one modified in place: {error}"
            ) from error
        leaves = list(self._constants)
        tensors = []
        for number, (place, tensor, requires_grad) in enumerate(
            zip(self._places, inputs, self._require_grad, strict=True)
        ):
            same = self._same_as[number]
            leaves[place] = tensors[same] if same < number else tensor.detach().requires_grad_(requires_grad)
            tensors.append(leaves[place])
        if self._structure is None:
            return tuple(leaves), {}, tensors
        return *tree_unflatten(leaves, self._structure), tensors

    def _refill(self, outputs: list[Tensor | None], recorded: dict[int, _Recorded]) -> None:
        """Move the replayed outputs into the empty slots, and rebind recorded values in the same memory."""
        for slot in filter(None, (reference() for reference in self._slots)):
            if slot.is_full or not slot.is_alive:
                continue
            replayed = outputs[slot.place]
            outputs[slot.place] = None
            assert replayed is not None, f"output {slot.place} of {self.name!r} was no tensor in its replay"
            address = slot_address(replayed)
            shared = [place for place, o in enumerate(outputs) if o is not None and slot_address(o) == address]
            for place in shared:
                outputs[place] = None
            aliases = {i: r for i, r in recorded.items() if slot_address(r.tensor) == address}
            rebound = slot.refill(replayed, [value.tensor for value in aliases.values()])
            for (i, value), tensor in zip(aliases.items(), rebound, strict=True):
                unchanged = value.tensor._version == value.version
                recorded[i] = _Recorded(tensor, tensor._version if unchanged else -1, slot.watches)


def _flattened(args: tuple, kwargs: dict) -> tuple[list[Any], TreeSpec | None]:
    """Return the leaves of arguments and their structure; None: positional arguments without containers."""
    if not kwargs and all(type(value) in _LEAVES for value in args):
        return list(args), None
    return tree_flatten((args, kwargs))


_LEAVES = frozenset({Tensor, nn.Parameter, bool, int, float, str, type(None)})
"""Frequent types of arguments that are no containers."""


@internals.outside_compiled_graphs
def _replayed_value(handle: _Handle) -> Tensor:
    """Return the saved value of a handle, computed by a replay."""
    region = handle.region
    if not region.has_returned:
        raise RecomputeUsageError(
            f"{region.name!r}: expected a call that leaves gradients to backward, got one that computes some itself "
            "(torch.autograd.grad or backward); take them out of the call, or use torch.utils.checkpoint for it"
        )
    with region.lock:
        if handle.place not in region._recorded:
            for slot in region.upstream:
                slot.restore()
            region.replay()
        return region._recorded.pop(handle.place).take(region.name)


def _no_second_graph(_: Any) -> Tensor:
    """Raise an error, because nothing differentiates the graph of a replay."""
    raise AssertionError("backward ran through the graph of a replay")


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _layout(output: Any) -> tuple | None:
    """Return shape, dtype, stride, offset, conjugation and sign of an output; None if it is not a strided tensor."""
    if not isinstance(output, Tensor) or output.layout is not torch.strided:
        return None
    place = tuple(output.shape), output.dtype, output.stride(), output.storage_offset()
    return *place, output.is_conj(), output.is_neg()


def _words(saved: tuple | None) -> str:
    """Describe shape, dtype and device of a saved value, for error messages."""
    return "nothing" if saved is None else f"{tuple(saved[0])} {saved[1]} on {saved[2]}"
