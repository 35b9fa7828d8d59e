"""What operations keep for backward while a layer's forward runs: parameters and activations that may be away then."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from reference_torch.offload.activations import ActivationGroup, ActivationOffload, SavedActivation
from reference_torch.offload.link import OffloadError
from reference_torch.offload.memory import OffloadedMemory, bring_back
from reference_torch.recompute import internals, lazy_restore


class SavedParameter:
    """A value kept for backward: a parameter's, somebody else's (``unpack``), or plainly itself."""

    __slots__ = ("memory", "tensor", "unpack", "version")

    def __init__(self, tensor: Any, memory: OffloadedMemory | None, unpack: Callable[[Any], Tensor] | None) -> None:
        self.tensor, self.memory, self.unpack = tensor, memory, unpack
        self.version = None if unpack is not None else tensor._version


def guard_saved(
    memories: Mapping[int, OffloadedMemory],
    require: Callable[[OffloadedMemory], None],
    activations: ActivationOffload | None,
    group: ActivationGroup | None,
) -> saved_tensors_hooks:
    """Hooks under which every saved parameter is brought back before its reader reads it, and activations leave.

    Hooks that are in force already get every other tensor; those of a checkpoint, which drops what it is given, and
    those of a caller get all activations. PyTorch's checkpoint gets parameters too: so whoever reads one begins its
    replay, and the layers that are replayed come first.

    Args:
        memories: those of parameters that move, by the address of their storage.
        require: brings one back.
        activations: moves activations; None: they stay.
        group: where activations are taken into.
    """
    outer = internals.outer_saved_tensor_hooks()
    if group is None or not lazy_restore.is_alone(outer):
        activations = None

    def keep(tensor: Tensor) -> SavedParameter | SavedActivation:
        memory = memories.get(internals.storage_address(tensor) or 0)
        if memory is None and activations is not None and group is not None:
            kept = activations.keep(group, tensor)
            if kept is not None:
                return kept
        is_checkpoint = outer is not None and outer[1].__module__ == "torch.utils.checkpoint"
        # Detached: a saved output that held its own graph node would be a cycle. A checkpoint would detach a parameter
        # itself, and that alias would be taken for one that nobody guards.
        is_detached = tensor.grad_fn is not None or (memory is not None and is_checkpoint)
        kept = tensor.detach() if is_detached else tensor
        if memory is not None:
            memory.note_alias(kept)
        if outer is not None and (memory is None or is_checkpoint):
            return SavedParameter(outer[0](tensor if memory is None else kept), memory, outer[1])
        return SavedParameter(kept, memory, None)

    def take(saved: SavedParameter | SavedActivation) -> Tensor:
        if isinstance(saved, SavedActivation):
            assert activations is not None, "who has kept it takes it out"
            return activations.take(saved)
        value = saved.tensor if saved.unpack is None else saved.unpack(saved.tensor)
        if saved.memory is not None:
            require(saved.memory)
        if saved.unpack is not None:
            return value
        bring_back(saved.tensor)  # another manager may have it by now
        if saved.tensor._version != saved.version:  # PyTorch leaves this check to the hooks
            raise OffloadError(
                "backward: expected values kept for backward unchanged, got one modified in place (one of the "
                f"variables needed for gradient computation is at version {saved.tensor._version}; expected version "
                f"{saved.version})"
            )
        return saved.tensor

    return saved_tensors_hooks(keep, take)
