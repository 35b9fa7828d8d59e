"""Tensor offload: parameters are placed on the host until their layer is used.

:class:`TensorOffloadManager` works with any modules, without the rest of this project. ``diptych/plans/offload/``
decides which layers move when. The package ``jax_impl/offload`` moves the same layers inside one compiled
program.
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
