"""Whatever configuration is accepted learns what the plain one learns; see tests/composition.py."""

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import combinations

import hypothesis
import pytest
from hypothesis import given, settings

from diptych.plans.config import TransformerConfig
from tests.composition import (
    BASE,
    DIMENSIONS,
    FEATURES,
    HYPER,
    LIKE_ANY,
    MUST_BE_ACCEPTED,
    OF_FAMILIES,
    QUICK,
    WITH_FP8,
    Pools,
    are_accepted,
    assert_learns_as_plain,
    blocks_on_ranks,
    compose,
    compositions,
    plain,
    torch_step,
)
from tests.composition_report import BEGIN, END, PAGE, RESULTS, table
from tests.jax_process import run_cases

EXAMPLES = min(settings.default.max_examples, 24)
"""Of make check at most 8; make composition draws more."""


@pytest.fixture(scope="module")
def pools():
    made = Pools()
    yield made
    made.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("features", [*MUST_BE_ACCEPTED, *OF_FAMILIES, *WITH_FP8], ids="+".join)
def test_what_must_be_accepted_learns_as_plain(features, pools):
    composition = compose(features)
    assert composition.features == tuple(sorted(features, key=[*FEATURES].index))
    assert_learns_as_plain(pools.step(composition), composition)


@pytest.mark.multiprocess
def test_fp8_blocks_of_ranks_are_those_of_one_device(pools):
    assert_learns_as_plain(pools.step(blocks_on_ranks()), blocks_on_ranks())


@pytest.mark.slow  # in make test, the fuzzer of compositions draws
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
def test_any_accepted_configuration_learns_as_plain(pools):
    drawn = Counter()

    @settings(max_examples=EXAMPLES)
    @given(compositions(QUICK))
    def learns_as_plain(composition):
        drawn.update(composition.features)
        drawn["ranks", composition.ranks] += 1
        assert_learns_as_plain(pools.step(composition), composition)

    learns_as_plain()
    wanted = ("schedule", "context", "replicas", "tensor", "streams", "recompute", "layers", "precision")
    missing = [dimension for dimension in wanted if not any(drawn[name] for name in DIMENSIONS[dimension])]
    assert len(missing) < 2, f"not drawn: {missing}"
    if EXAMPLES >= 24:
        assert all(drawn["ranks", ranks] for ranks in (1, 2, 4, 8)), drawn  # 16: rarely


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "features",
    [
        ("kernels", "GDN", "context ranks", "replicas"),
        pytest.param(("kernels", "1f1b", "mHC", "recompute mhc", "dropout"), marks=pytest.mark.slow),
        pytest.param(("kernels", "interleaved", "KDA", "context ranks, ring"), marks=pytest.mark.slow),
        pytest.param(("kernels", "zb-h1", "mHC", "activations offloaded"), marks=pytest.mark.slow),
        pytest.param(("kernels", "KDA", "documents", "context ranks, scan", "1f1b"), marks=pytest.mark.slow),
        pytest.param(("kernels", "GDN", "mHC", "tensor-parallel ranks, tokens"), marks=pytest.mark.slow),
        pytest.param(("kernels", "KDA", "tensor-parallel ranks", "1f1b"), marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_kernels_learn_as_plain(features, pools):
    composition = compose(features, 4)
    assert_learns_as_plain(pools.step(composition, 280.0), composition)


@pytest.mark.slow  # in make test, the fuzzer of compositions draws
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_jax_learns_as_plain():
    run_cases("not slow", 880, "tests/composition_jax_cases.py")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(2700)
def test_jax_learns_as_plain_whatever_is_asked():
    run_cases("slow", 2680, "tests/composition_jax_cases.py")


def test_every_pair_of_features_is_accepted_but_those_listed():
    """Of two dimensions; what takes three to be refused says why."""
    for pair in combinations(FEATURES, 2):
        if FEATURES[pair[0]][0] != FEATURES[pair[1]][0]:
            assert are_accepted(*pair) == (not refusal_of(pair)), pair
            assert not are_accepted(*pair) or compose(pair).features == pair


@hypothesis.settings(max_examples=200)
@given(hypothesis.strategies.sets(hypothesis.strategies.sampled_from([*FEATURES]), min_size=3, max_size=8))
def test_a_refusal_names_the_setting(names):
    refused = refusal_of(names)
    assert not refused or re.match(r"[a-z0-9_]+(, [a-z0-9_]+)*: expected .*, got ", refused), refused


def refusal_of(names) -> str:
    """Why a combination is not accepted, or the empty string."""
    try:
        compose(names)
    except ValueError as error:
        return str(error)
    return ""


def test_the_plain_model_has_nothing_but_what_is_learnt():
    everything = compose(("1f1b", "context ranks", "replicas", "recompute mhc", "parameters offloaded", "documents"))
    alone = plain(everything)
    assert alone.ranks == 1
    assert alone.documents
    settings = {name: getattr(everything.model, name) for name in ("num_layers", *HYPER)}
    assert alone.model == replace(BASE, **settings, pipeline_timeout=LIKE_ANY["pipeline_timeout"])
    assert not {"hidden_dropout", "layer_pattern", "bf16", "seed", "use_flash_attn"} & LIKE_ANY.keys()
    assert LIKE_ANY.keys() <= TransformerConfig.__dataclass_fields__.keys()


def test_a_wrong_gradient_is_seen():
    composition = compose(("dropout",))
    found = torch_step(composition)
    assert_learns_as_plain(found, composition)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    wrong = found.gradients | {name: found.gradients[name] * (1 + 1e-9)}
    with pytest.raises(AssertionError, match=rf"gradient of {name}: 1\.0e-09 from the plain one"):
        assert_learns_as_plain(found._replace(gradients=wrong), composition)
    with pytest.raises(AssertionError, match="loss after the step"):
        assert_learns_as_plain(found._replace(next_loss=found.next_loss + 1e-7), composition)


def test_the_page_has_the_table_of_the_results():
    results = json.loads(RESULTS.read_text())
    assert not [case for case in results["cases"] if case["failure"]]
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0] == table(results)
