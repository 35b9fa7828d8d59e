"""Tensor offload: parameters that lie on the host until their layer is used.

Usable alone, with anyone's modules: see :class:`TensorOffloadManager`. What moves when is decided in
``diptych/plans/offload.py``; twin of ``jax_impl/offload.py``, which moves the same layers inside one compiled program.
"""

from reference_torch.offload.door import get_offload_manager, initialize_offload_manager
from reference_torch.offload.link import OffloadError
from reference_torch.offload.manager import TensorOffloadManager
from reference_torch.offload.memory import host_value
from reference_torch.offload.statistics import OffloadStatistics

__all__ = [
    "OffloadError",
    "OffloadStatistics",
    "TensorOffloadManager",
    "get_offload_manager",
    "host_value",
    "initialize_offload_manager",
]
