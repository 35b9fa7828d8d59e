"""Recompute that shares storages: activations are dropped after forward and recomputed in backward.

:class:`CheckpointWithoutOutput` works around any function, without the rest of this project. This package empties and
refills storages; its mirror ``jax_impl/recompute`` uses ``jax.checkpoint`` policies instead.
``diptych/plans/recompute.py`` decides which values are dropped.
"""

from reference_torch.recompute.blocks import SAVE_ALL, BlockRecomputation, run_block
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
from reference_torch.recompute.modules import ModuleBytes, RecomputedModules, recompute_modules
from reference_torch.recompute.region import before_replay
from reference_torch.recompute.report import NamedValue, SavedValue, name_value, recorded_names, residual_report

__all__ = [
    "CheckpointWithoutOutput",
    "MindSpeedCheckpointWithoutOutput",
    "MHCBlockRecomputeManager",
    "recompute_modules",
    "RecomputedModules",
    "ModuleBytes",
    "lazy_restore",
    "before_replay",
    "BlockRecomputation",
    "SAVE_ALL",
    "run_block",
    "name_value",
    "NamedValue",
    "recorded_names",
    "residual_report",
    "SavedValue",
    "measure_memory",
    "MemoryUse",
    "RecomputeError",
    "DiscardedActivationError",
    "RecomputeMismatchError",
    "RecomputeUsageError",
]
