"""Settings of a training run and the rules that validate them.

Each dataclass is frozen and validated on construction, so every configuration that exists can run. The rules are
tables with one entry per rule and its error message; nothing else in the project decides which settings are valid.

Setting names follow Megatron-LM where it has the setting.
"""

from diptych.plans.config.model import MODEL_RULES, TransformerConfig
from diptych.plans.config.precision import ITEM_SIZES, KEPT_IN_FLOAT32
from diptych.plans.config.rules import Rule
from diptych.plans.config.training import DATA_RULES, TRAIN_RULES, DataConfig, TrainConfig

__all__ = ["TransformerConfig", "DataConfig", "TrainConfig", "ITEM_SIZES", "KEPT_IN_FLOAT32", "MODEL_RULES", "RULES"]

RULES: dict[type, tuple[Rule, ...]] = {
    TransformerConfig: MODEL_RULES,
    DataConfig: DATA_RULES,
    TrainConfig: TRAIN_RULES,
}
"""All rules, by configuration class."""
