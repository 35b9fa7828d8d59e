"""One call that can be replayed, and the storages it can refill.

The call runs once, with gradients enabled, and its autograd graph is the real one. Hooks drop every value the
graph would keep; in their place stand handles that replay the call on first use. The call's inputs are kept by a
small autograd node, as any operation keeps its inputs, so version checks and outer hooks (offload, an outer
checkpoint) apply to them. Ownership runs from reader to what is read, never back: handles hold their region, a
region holds the slots its inputs come from, slots hold their region, and a region knows its own handles and slots
only weakly. So everything is freed by reference counting as backward passes.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from reference_torch.recompute import internals
from reference_torch.recompute.guards import RecomputeMismatchError, RecomputeUsageError
from reference_torch.recompute.operations import OperationRecorder
from reference_torch.recompute.slots import (
    Slot,
    in_replay,
    is_held_only_by,
    replaying,
    slot_address,
    slot_of,
)
from reference_torch.recompute.state import ReplayState

before_replay: ContextVar[Callable[[list[Tensor]], None] | None] = ContextVar("before_replay", default=None)
"""Told, before each replay of a region made now, the parameters that the replay will read."""


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


class _Recorded(NamedTuple):
    """A value that a replay has computed, until its reader takes it."""

    tensor: Tensor
    version: int
    slot: Slot | None = None
    """The output whose memory the value shares."""

    def take(self, name: str) -> Tensor:
        """Return the value.

        Raises:
            RecomputeUsageError: it was modified in place after the operation had saved it.
        """
        changed_output = self.slot is not None and self.slot.is_changed
        if changed_output or self.tensor._version != self.version:
            raise RecomputeUsageError(
                f"{name!r}: expected values kept for backward unchanged, got one modified in place (one of the "
                f"variables needed for gradient computation is at version {self.tensor._version}; expected version "
                f"{self.version}); clone it before it is changed"
            )
        return self.tensor


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
        slots = [slot for slot in map(slot_of, inputs) if slot is not None]
        self.upstream = list({slot.address: slot for slot in slots}.values())
        if internals.outer_saved_tensor_hooks() is None:  # else the hooks hold the inputs, as aliases
            for slot in slots:
                slot.note_replayer(self)
        self.state = ReplayState(inputs, generators)
        self.is_nested = in_replay()
        self.lock = threading.RLock()
        """Held while the call is made again: CUDA runs backward on a thread a device."""
        self._operations = OperationRecorder(inputs)
        self._handles: list[weakref.ref[_Held]] = []
        self._saved: list[tuple] = []
        self._recorded: dict[int, _Recorded] = {}
        self._parameters: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._before_replay = before_replay.get()
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

        inputs = {id(leaf) for leaf in tree_leaves((args, kwargs))}

        def drop(tensor: Tensor) -> _Held:
            owner = tensor if tensor._base is None else tensor._base
            if owner.is_leaf and owner.requires_grad and id(owner) not in inputs:
                self._parameters[id(owner)] = weakref.ref(owner), owner._version
            handle = _Held(self, len(self._handles))
            self._handles.append(weakref.ref(handle))
            self._saved.append((tensor.shape, tensor.dtype, tensor.device))
            return handle

        with self._operations, saved_tensors_hooks(drop, _compute_again):
            output = self.function(*args, **kwargs)
        if [leaf._version for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)] != self._versions:
            raise RecomputeUsageError(
                f"{self.name!r}: expected a call that leaves its inputs as they are, got one that changes an input in "
                "place, which cannot be replayed; let it work on a copy"
            )
        module = self.function if isinstance(self.function, nn.Module) else getattr(self.function, "__self__", None)
        if isinstance(module, nn.Module):  # also those autograd does not save: a bias, a weight cast by autocast
            for parameter in module.parameters():
                self._parameters[id(parameter)] = weakref.ref(parameter), parameter._version
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
        if self._before_replay is not None:
            read = [reference() for reference, _ in self._parameters.values()]
            self._before_replay([parameter for parameter in read if parameter is not None])
        args, kwargs = self._inputs()
        operations = OperationRecorder([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        recorded: dict[int, _Recorded] = {}
        count = 0

        def mismatch(expected: str, actual: str) -> RecomputeMismatchError:
            difference = self._operations.difference(operations, whole=False)
            return RecomputeMismatchError(
                f"replay of {self.name!r}: expected {expected}, got {actual}; a recomputed call must do the same each "
                f"time{f' ({difference}; was a module switched between train() and eval()?)' if difference else ''}"
            )

        def record(tensor: Tensor) -> None:
            nonlocal count
            expected = self._saved[count] if count < len(self._saved) else None
            if expected != (tensor.shape, tensor.dtype, tensor.device):
                actual = _words((tensor.shape, tensor.dtype, tensor.device))
                raise mismatch(f"value {count} kept for backward to be {_words(expected)}", actual)
            if self._handles[count]() is not None:
                # A number that became a tensor has no graph, and no detach() under a dispatch mode.
                value = tensor if tensor.grad_fn is None else tensor.detach()
                recorded[count] = _Recorded(value, tensor._version)
            count += 1

        hooks = saved_tensors_hooks(record, _no_second_graph)
        with self.state.entered(), replaying(), torch.enable_grad(), operations, hooks:
            output = self.function(*args, **kwargs)
        del args, kwargs
        if count != len(self._saved):
            raise mismatch(f"{len(self._saved)} values kept for backward", str(count))
        outputs = [leaf.detach() if isinstance(leaf, Tensor) else None for leaf in tree_leaves(output)]
        del output
        layout = [_layout(output) for output in outputs]
        if layout != self._output_layout:
            expected = f"outputs {self._output_layout} (shape, dtype, stride, offset, conjugation, sign) as in forward"
            raise mismatch(expected, str(layout))
        difference = self._operations.difference(operations)
        if difference is not None:
            raise RecomputeMismatchError(
                f"replay of {self.name!r}: expected the operations and values of its forward, but {difference}; pass "
                "what changes as an argument, and change it after backward (was a module switched between train() and "
                "eval()?)"
            )
        self._refill(outputs, recorded)
        self._recorded.update(recorded)

    def _inputs(self) -> tuple[tuple, dict]:
        for parameter, version in ((reference(), version) for reference, version in self._parameters.values()):
            if parameter is not None and parameter._version != version:
                raise RecomputeUsageError(
                    f"{self.name!r}: expected its parameters unchanged until its replay, got one of shape "
                    f"{tuple(parameter.shape)} modified in place; step the optimizer after backward"
                )
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

    def _refill(self, outputs: list[Tensor | None], recorded: dict[int, _Recorded]) -> None:
        for slot in filter(None, (reference() for reference in self._slots)):
            if slot.is_full or not slot.is_alive:
                continue
            replayed, outputs[slot.place] = outputs[slot.place], None
            assert replayed is not None, f"output {slot.place} of {self.name!r} was no tensor in its replay"
            address = slot_address(replayed)
            shared = [place for place, o in enumerate(outputs) if o is not None and slot_address(o) == address]
            for place in shared:
                outputs[place] = None
            aliases = {i: r for i, r in recorded.items() if slot_address(r.tensor) == address}
            rebound = slot.refill(replayed, [value.tensor for value in aliases.values()])
            for (i, value), tensor in zip(aliases.items(), rebound, strict=True):
                unchanged = value.tensor._version == value.version
                recorded[i] = _Recorded(tensor, tensor._version if unchanged else -1, slot)


@internals.outside_compiled_graphs
def _compute_again(handle: _Held) -> Tensor:
    region = handle.region
    with region.lock:
        if handle.place not in region._recorded:
            for slot in region.upstream:
                slot.restore()
            region.replay()
        return region._recorded.pop(handle.place).take(region.name)


def _no_second_graph(_: Any) -> Tensor:
    raise AssertionError("backward ran through the graph of a replay")


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _layout(output: Any) -> tuple | None:
    if not isinstance(output, Tensor) or output.layout is not torch.strided:
        return None
    place = tuple(output.shape), output.dtype, output.stride(), output.storage_offset()
    return *place, output.is_conj(), output.is_neg()


def _words(saved: tuple | None) -> str:
    return "nothing" if saved is None else f"{tuple(saved[0])} {saved[1]} on {saved[2]}"
