"""Recompute by policy: activations are dropped after forward and recomputed in backward.

This package uses ``jax.checkpoint`` policies. Its counterpart ``reference_torch/recompute`` empties and refills
storages. ``diptych/plans/recompute.py`` decides which values are dropped.
"""

from jax_impl.recompute.modules import ModuleBytes, RecomputedModules, recompute_modules
from jax_impl.recompute.policies import (
    SavedValue,
    VaryingLeaf,
    arguments_read,
    checkpoint_blocks,
    layer_scope,
    name_value,
    recompute_policy,
    residual_report,
    run_from_saved,
    run_saving,
    varying_leaves,
    with_leaves,
)

__all__ = [
    "recompute_modules",
    "RecomputedModules",
    "ModuleBytes",
    "checkpoint_blocks",
    "recompute_policy",
    "layer_scope",
    "name_value",
    "residual_report",
    "SavedValue",
    "VaryingLeaf",
    "varying_leaves",
    "with_leaves",
    "arguments_read",
    "run_from_saved",
    "run_saving",
]
