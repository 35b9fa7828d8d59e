"""What ranks compute in a pipeline beside the single-device model."""

from dataclasses import replace

import numpy as np
import pytest

from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.named import schedule_for
from parity.compare import relative_difference
from parity.tolerances import GRADIENT
from reference_torch.rank_pool import RankPool
from tests.pipeline.jobs import TINY, Case, Outcome, unsharded_outcome

JOBS = "tests.pipeline.jobs"
multiprocess = pytest.mark.multiprocess


def divided(p: int, schedule: str | None = None, v: int | None = None, **settings) -> TransformerConfig:
    return replace(
        TINY,
        pipeline_model_parallel_size=p,
        pipeline_schedule=schedule,
        virtual_pipeline_model_parallel_size=v,
        **settings,
    )


def check(case: Case, ranks: list[Outcome], expected: Outcome) -> None:
    """Losses on the last stage's rank alone, every gradient of the single-device model, actions as planned.

    Ranks of one replica follow each other; all replicas end with the same gradients.
    """
    dtype, p = case.config.compute_dtype, case.config.pipeline_model_parallel_size
    schedule = schedule_for(case.config, case.num_microbatches, case.forward_only)
    home = schedule.rank_of(schedule.num_stages - 1)
    replicas = [ranks[first : first + p] for first in range(0, len(ranks), p)]
    for number, replica in enumerate(replicas):
        for rank, outcome in enumerate(replica):
            if rank != home:
                assert outcome.reports == []
            actions = schedule.actions[rank]
            assert tuple(outcome.trace) == actions, f"rank {rank}"
        count = case.num_microbatches
        losses = expected.reports[number * count : (number + 1) * count]
        assert replica[home].reports == pytest.approx(losses, rel=GRADIENT[dtype], abs=0)
        check_gradients(replica, {} if case.forward_only else expected.gradients, dtype)


def check_gradients(ranks: list[Outcome], expected: dict[str, np.ndarray], dtype: str = "float64") -> None:
    """Each expected gradient on some rank, and the same on every rank that has it."""
    assert {name for outcome in ranks for name in outcome.gradients} == expected.keys()
    for rank, outcome in enumerate(ranks):
        for name, gradient in outcome.gradients.items():
            assert gradient.dtype == expected[name].dtype
            difference = relative_difference(gradient, expected[name])
            assert difference <= GRADIENT[dtype], f"rank {rank}, {name}: {difference:.1e}"


def equal_to_unsharded(pool: RankPool, cases: dict[str, Case]) -> None:
    per_rank = pool.run(f"{JOBS}:run_cases", [*cases.values()])
    for place, (name, case) in enumerate(cases.items()):
        replicas = pool.size // case.config.pipeline_model_parallel_size
        try:
            check(case, [outcomes[place] for outcomes in per_rank], unsharded_outcome(case, replicas))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
