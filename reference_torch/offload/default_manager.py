"""The default offload manager of the process, for models that request it where they build their layers."""

from reference_torch.offload.manager import TensorOffloadManager

_manager: TensorOffloadManager | None = None


def initialize_offload_manager(
    enabled: bool = True, pin_memory: bool = True, num_prefetch_layers: int = 1
) -> TensorOffloadManager:
    """Create the default manager of the process and close the previous one.

    Args:
        enabled: see TensorOffloadManager.
        pin_memory: see TensorOffloadManager.
        num_prefetch_layers: see TensorOffloadManager.
    """
    global _manager
    manager = TensorOffloadManager(enabled, pin_memory, num_prefetch_layers)
    if _manager is not None:
        _manager.close()
    _manager = manager
    return manager


def get_offload_manager() -> TensorOffloadManager | None:
    """Return the default manager of the process, or None before it is created."""
    return _manager
