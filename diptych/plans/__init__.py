"""Decisions that need no tensors: configurations, data, parameters and schedules.

Both backends and the kernels execute these decisions and make none of their own. This package imports the standard
library, numpy, ml_dtypes and safetensors only.
"""

from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig

__all__ = ["DataConfig", "TrainConfig", "TransformerConfig"]
