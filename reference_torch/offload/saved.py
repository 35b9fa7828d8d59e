"""Saved-tensor hooks of a layer's forward, for parameters and activations that may be on the host in backward."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from reference_torch.offload.activations import ActivationGroup, ActivationOffload, SavedActivation
from reference_torch.offload.link import OffloadError
from reference_torch.offload.storage import OffloadedStorage, fetch_now
from reference_torch.recompute import internals, lazy_restore


class SavedValue:
    """A stand-in for a value saved for backward that activation offload does not move.

    Args:
        tensor: the value, or what the outer hooks have packed it to.
        storage: storage of a parameter that moves; None: the value is no such parameter.
        outer_unpack: unpack of the outer hooks; None: there are none.
    """

    __slots__ = ("outer_unpack", "storage", "tensor", "version")

    def __init__(
        self, tensor: Any, storage: OffloadedStorage | None, outer_unpack: Callable[[Any], Tensor] | None
    ) -> None:
        self.tensor = tensor
        self.storage = storage
        self.outer_unpack = outer_unpack
        self.version = None if outer_unpack is not None else tensor._version


def layer_saved_tensor_hooks(
    storages: Mapping[int, OffloadedStorage],
    require: Callable[[OffloadedStorage], None],
    activations: ActivationOffload | None,
    group: ActivationGroup | None,
) -> saved_tensors_hooks:
    """Return hooks that fetch every saved parameter before it is read, and that offload activations.

    Outer hooks receive every other tensor. The hooks of a checkpoint, which drops its tensors, and those of a caller
    receive all activations. PyTorch's checkpoint also receives parameters, so that reading a parameter starts its
    replay, and the replayed layers are fetched first.

    Args:
        storages: storages of the parameters that move, by the address of their storage.
        require: fetches a storage and waits for it.
        activations: moves activations; None: they stay on the device.
        group: group to which saved activations are added.
    """
    outer = internals.outer_saved_tensor_hooks()
    # Outer hooks other than those of recompute receive the activations, so that none moves.
    if group is None or not lazy_restore.is_alone(outer):
        activations = None

    def pack(tensor: Tensor) -> SavedValue | SavedActivation:
        storage = storages.get(internals.storage_address(tensor) or 0)
        if storage is None and activations is not None and group is not None:
            activation = activations.pack(group, tensor)
            if activation is not None:
                return activation
        is_checkpoint = outer is not None and getattr(outer[1], "__module__", None) == "torch.utils.checkpoint"
        # Detach, because a saved output that held its own graph node would be a reference cycle. A checkpoint would
        # detach a parameter itself, and the storage would not know that alias.
        is_detached = tensor.grad_fn is not None or (storage is not None and is_checkpoint)
        saved = tensor.detach() if is_detached else tensor
        if storage is not None:
            storage.note_alias(saved)
        if outer is not None and (storage is None or is_checkpoint):
            return SavedValue(outer[0](tensor if storage is None else saved), storage, outer[1])
        return SavedValue(saved, storage, None)

    def unpack(saved: SavedValue | SavedActivation) -> Tensor:
        if isinstance(saved, SavedActivation):
            assert activations is not None, "an activation was saved without activation offload"
            return activations.unpack(saved)
        value = saved.tensor if saved.outer_unpack is None else saved.outer_unpack(saved.tensor)
        if saved.storage is not None:
            require(saved.storage)
        if saved.outer_unpack is not None:
            return value
        fetch_now(saved.tensor)  # another manager may have registered it since
        if saved.tensor._version != saved.version:  # PyTorch checks versions only without hooks
            raise OffloadError(
                "backward: expected values saved for backward unchanged, got one modified in place (one of the "
                f"variables needed for gradient computation is at version {saved.tensor._version}; expected version "
                f"{saved.version})"
            )
        return saved.tensor

    pack.outer = outer  # pyright: ignore[reportFunctionMemberAccess]  # read by recompute.internals
    return saved_tensors_hooks(pack, unpack)
