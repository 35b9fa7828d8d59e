"""Tensor offload: parameters are placed on the host until their layer is used.

:class:`TensorOffloadManager` works with any modules, without the rest of this project. ``diptych/plans/offload/``
decides which layers move when. The package ``jax_impl/offload`` moves the same layers inside one compiled
program.

In the order in which to read them, the files are:

    link, statistics, lifetime                  a copy, counters of copies, and weak references to a manager
    storage, writes                             a storage that is copied, and writes that nothing counts
    activations, saved                          values saved for backward
    interruptions, observe                      hooks that detect uses of a layer
    registry, layer                             the hooks and the storages of a registered layer
    update_targets, gradients, optimizer_state  what an update of a layer needs besides its parameters
    optimizer                                   an optimizer step in parts
    residency, scheduling                       where layers are, and what each use fetches and evicts
    manager                                     the public interface
    default_manager, modules                    the manager of the process, and submodules by name
"""

from reference_torch.offload.default_manager import get_offload_manager, initialize_offload_manager
from reference_torch.offload.link import OffloadError
from reference_torch.offload.manager import TensorOffloadManager
from reference_torch.offload.modules import offload_modules
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.offload.storage import host_value

__all__ = [
    "OffloadError",
    "OffloadStatistics",
    "TensorOffloadManager",
    "get_offload_manager",
    "host_value",
    "initialize_offload_manager",
    "offload_modules",
]
