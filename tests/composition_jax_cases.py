"""Compositions in JAX; tests/test_composition.py runs this file in a process with eight devices."""

import os

import hypothesis
import jax
import pytest
from hypothesis import Phase, given, settings

from diptych.plans.model.implementation import callback_threads
from tests.composition import (
    MAX_RANKS,
    MUST_BE_ACCEPTED,
    OF_FAMILIES,
    QUICK,
    WITH_FP8,
    assert_learns_as_plain,
    blocks_on_ranks,
    compose,
    compositions,
    jax_step,
)

os.environ["NPROC"] = str(callback_threads(MAX_RANKS))
jax.config.update("jax_num_cpu_devices", MAX_RANKS)
jax.config.update("jax_enable_x64", True)
pytestmark = pytest.mark.usefixtures("few_rounds")
COMPILED = settings(phases=[Phase.explicit, Phase.generate], suppress_health_check=[*hypothesis.HealthCheck])
"""Settings without shrinking, because every example is compiled."""

SOME = [features for number, features in enumerate(MUST_BE_ACCEPTED) if number % 5 == 0]
"""Every schedule, recompute and offload; PyTorch runs all combinations."""
NARROW = (
    ("bf16", "1f1b", "mHC", "recompute mhc"),
    ("bf16", "context ranks", "KDA"),
    ("bf16", "replicas", "zb-h1", "parameters offloaded"),
)
"""Compositions that random draws rarely contain."""


def rounds_alike(composition) -> bool:
    """Whether a step can be compared: in bfloat16, scores that round differently give a token other experts."""
    model = composition.model
    return not (model.bf16 and any(model.layer(number).moe for number in range(model.num_layers)))


OF_FAMILIES_ALIKE = [features for features in OF_FAMILIES if rounds_alike(compose(features))]
SOME_OF_FAMILIES = [features for number, features in enumerate(OF_FAMILIES_ALIKE) if number % 5 in (0, 3)]


def check(composition) -> None:
    assert_learns_as_plain(jax_step(composition), composition, same_rounding=False)


@pytest.mark.parametrize(
    "features",
    [
        ("zb-h1", "mHC", "recompute mhc + layernorm", "parameters offloaded", "activations offloaded", "dropout"),
        ("KDA", "context ranks", "1f1b", "dropout"),
        ("experts", "zb-h1"),
    ],
    ids="+".join,
)
def test_some_of_what_must_be_accepted(features):
    check(compose(features))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("features", [*SOME, *NARROW, *SOME_OF_FAMILIES, *WITH_FP8], ids="+".join)
def test_what_must_be_accepted(features):
    check(compose(features))


def test_blocks_on_ranks():
    check(blocks_on_ranks())


@pytest.mark.timeout(600)
@settings(COMPILED, max_examples=3)
@given(compositions(QUICK).filter(rounds_alike))
def test_any_accepted_configuration(composition):
    check(composition)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(COMPILED, max_examples=6)
@given(compositions(QUICK).filter(rounds_alike))
def test_more_accepted_configurations(composition):
    check(composition)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "features",
    [
        ("kernels", "GDN", "context ranks", "1f1b"),
        ("kernels", "mHC", "recompute mhc", "replicas"),
        ("kernels", "GDN", "mHC", "tensor-parallel ranks, tokens"),
    ],
    ids="+".join,
)
def test_kernels(features):
    check(compose(features, 4))
