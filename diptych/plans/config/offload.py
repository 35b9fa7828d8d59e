"""Rules of offload."""

from diptych.plans.config.rules import Rule, count, flag, names_layers
from diptych.plans.model.layers import offloaded_values

OFFLOAD_LAYER_RULES: tuple[Rule, ...] = (
    flag("enable_activation_offload"),
    names_layers("activation_offload_layers", "enable_activation_offload", offloaded_values),
)
"""Rules that come before those that read the settings of layers."""

OFFLOAD_RULES: tuple[Rule, ...] = (
    flag("enable_tensor_offload"),
    flag("tensor_offload_pin_memory"),
    count("tensor_offload_num_prefetch_layers", least=0),
    count("activation_offload_min_bytes", least=0),
)
