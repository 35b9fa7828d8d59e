"""Offload: moves of parameters and activations between device and host.

A layer's parameters are on the device during its use and while it is in the window of the next layers; otherwise they
are on the host only. The order of uses determines all moves: forwards (F), replays of a forward during backward (R),
backwards (B) and optimizer updates (S). When a use begins, the missing layers of the window are fetched: the used
layer and the next ``num_prefetch_layers`` others. When the use ends, layers outside the next window are evicted; they
are copied to the host only if the optimizer changed them. At most ``num_prefetch_layers + 1`` layers are on the device,
and nothing moves between the last forward and the first backward.

Both backends follow ``next_layers``. ``plan_offload`` computes the same moves in advance, and
``diptych.planner.offload_times`` adds their times.
"""

from diptych.plans.offload.activations import (
    ActivationMoves,
    activation_event,
    forwards_needed_next,
    layers_that_stay,
    plan_activations,
)
from diptych.plans.offload.moves import (
    EMPTY_PLAN,
    OffloadPlan,
    UseMoves,
    check_num_prefetch_layers,
    join_plans,
    layer_storages,
    layers_after,
    plan_actions,
    plan_offload,
    split_first_pass,
    unmoved,
)
from diptych.plans.offload.statistics import MoveCounter, describe_statistics, plan_statistics, total_statistics
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
    "UseMoves",
    "next_layers",
    "pass_uses",
    "replays_layers",
    "step_uses",
    "rank_uses",
    "action_uses",
    "rank_layers",
    "stage_layers",
    "expected_uses",
    "OffloadPlan",
    "EMPTY_PLAN",
    "MoveCounter",
    "plan_statistics",
    "split_first_pass",
    "layers_after",
    "plan_offload",
    "plan_actions",
    "join_plans",
    "unmoved",
    "check_num_prefetch_layers",
    "layer_storages",
    "describe_statistics",
    "total_statistics",
    "ActivationMoves",
    "activation_event",
    "forwards_needed_next",
    "layers_that_stay",
    "plan_activations",
]
