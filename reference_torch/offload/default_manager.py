"""The seed's door: one manager a process, for models that ask for it where their layers are built."""

from reference_torch.offload.manager import TensorOffloadManager

_manager: TensorOffloadManager | None = None


def initialize_offload_manager(
    enabled: bool = True, pin_memory: bool = True, num_prefetch_layers: int = 1
) -> TensorOffloadManager:
    """Make the process's manager; the one before is closed. Arguments as TensorOffloadManager's."""
    global _manager
    manager = TensorOffloadManager(enabled, pin_memory, num_prefetch_layers)
    if _manager is not None:
        _manager.close()
    _manager = manager
    return manager


def get_offload_manager() -> TensorOffloadManager | None:
    """The process's manager; None before it is made."""
    return _manager
