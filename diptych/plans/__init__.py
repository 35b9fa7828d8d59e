"""What is decided before a tensor exists: configurations, data, parameters, schedules.

Both backends execute the plans made here and decide nothing of the kind themselves. This package
imports the standard library and numpy only.
"""

from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig

__all__ = ["DataConfig", "TrainConfig", "TransformerConfig"]
