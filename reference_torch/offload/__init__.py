"""Tensor offload: parameters are placed on the host until their layer is used.

:class:`TensorOffloadManager` works with any modules, without the rest of this project. ``diptych/plans/offload/``
decides which layers move when. The package ``jax_impl/offload`` moves the same layers inside one compiled
program.

In the order in which to read them, the files are:

    link, storage, layer          a copy, a storage that is copied, and the storages of a layer
    residency, scheduling         where layers are, and what each use fetches and evicts
    observe, manager              hooks that detect uses, and the public interface
    activations, saved            values saved for backward
    gradients, optimizer_state, optimizer      what an update needs besides parameters
    writes, registry, lifetime, interruptions  writes that nothing counts, pickling, garbage collection, exceptions
    default_manager, modules, statistics       the manager of the process, submodules by name, counters
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
