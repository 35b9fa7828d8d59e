"""Every setting of a run, and every rule a setting must obey.

Each dataclass is frozen and checked on construction, so a configuration that exists is a configuration
that can run. The rules stand in tables, one entry each with its message; nothing else in the project
decides what is allowed.

Flag names follow Megatron-LM where it has the setting.
"""

from diptych.plans.config.model import MODEL_RULES, TransformerConfig
from diptych.plans.config.precision import KEPT_IN_FLOAT32
from diptych.plans.config.rules import Rule
from diptych.plans.config.training import DATA_RULES, TRAIN_RULES, DataConfig, TrainConfig

__all__ = ["TransformerConfig", "DataConfig", "TrainConfig", "KEPT_IN_FLOAT32", "RULES"]

RULES: dict[type, tuple[Rule, ...]] = {
    TransformerConfig: MODEL_RULES,
    DataConfig: DATA_RULES,
    TrainConfig: TRAIN_RULES,
}
"""All rules, by the configuration they are about."""
