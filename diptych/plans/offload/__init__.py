"""Offload: which layer's parameters move between device and host, and when.

A layer lies on the device while it is used and while it is one of the next layers to be used; else only its copy on
the host is there. All that decides is the order of uses: the layers' forwards (F), replays of a forward during
backward (R), backwards (B) and optimizer updates (S). When a use begins, the layers of the window are fetched that are
not there: the used one, and the next ``num_prefetch_layers`` others in the order of uses. When it ends, a layer
outside the next window is evicted; its memory is dropped, and written back first only if the optimizer has changed it.
So at most ``num_prefetch_layers + 1`` layers are ever there, and around a turn (last forward to first backward)
nothing moves.

Both backends move what ``next_layers`` says; ``plan_offload`` is the same, ahead of time, and
``diptych.planner.offload_times`` adds time.
"""

from diptych.plans.offload.activations import ActivationStep, activation_event, next_backwards, plan_activations
from diptych.plans.offload.moves import (
    OffloadPlan,
    Step,
    check_num_prefetch_layers,
    join_plans,
    layer_storages,
    plan_actions,
    plan_offload,
    unmoved,
)
from diptych.plans.offload.statistics import describe_statistics, total_statistics
from diptych.plans.offload.uses import (
    Use,
    action_uses,
    expected_uses,
    next_layers,
    pass_uses,
    rank_layers,
    rank_uses,
    replays_layers,
    stage_layers,
    step_uses,
)

__all__ = [
    "Use",
    "next_layers",
    "pass_uses",
    "replays_layers",
    "step_uses",
    "rank_uses",
    "action_uses",
    "rank_layers",
    "stage_layers",
    "expected_uses",
    "Step",
    "OffloadPlan",
    "plan_offload",
    "plan_actions",
    "join_plans",
    "unmoved",
    "check_num_prefetch_layers",
    "layer_storages",
    "describe_statistics",
    "total_statistics",
    "ActivationStep",
    "activation_event",
    "next_backwards",
    "plan_activations",
]
