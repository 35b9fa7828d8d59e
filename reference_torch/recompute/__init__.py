"""Recompute that shares storages: activations are dropped after forward and computed again before backward.

Usable alone, around anyone's function: see :class:`CheckpointWithoutOutput`. Twin of
``jax_impl/recompute.py``, which does by ``jax.checkpoint`` policies what is done here by emptying and
refilling storages; what is dropped is decided in ``diptych/plans/recompute.py``.
"""

from reference_torch.recompute.blocks import KEEP_ALL, BlockRecomputation, run_block
from reference_torch.recompute.checkpoint import (
    CheckpointWithoutOutput,
    MHCBlockRecomputeManager,
    MindSpeedCheckpointWithoutOutput,
    lazy_restore,
)
from reference_torch.recompute.guards import (
    DiscardedActivationError,
    RecomputeError,
    RecomputeMismatchError,
    RecomputeUsageError,
)
from reference_torch.recompute.memory import MemoryUse, measure_memory
from reference_torch.recompute.region import before_replay
from reference_torch.recompute.report import KeptValue, name_value, residual_report

__all__ = [
    "CheckpointWithoutOutput",
    "MindSpeedCheckpointWithoutOutput",
    "MHCBlockRecomputeManager",
    "lazy_restore",
    "before_replay",
    "BlockRecomputation",
    "KEEP_ALL",
    "run_block",
    "name_value",
    "residual_report",
    "KeptValue",
    "measure_memory",
    "MemoryUse",
    "RecomputeError",
    "DiscardedActivationError",
    "RecomputeMismatchError",
    "RecomputeUsageError",
]
