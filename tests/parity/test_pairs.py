"""Pairs of PyPI on docs/pairs.md, and the faults of the toolkit that they revealed."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from benchmarks.pair_cases import EQUAL, PAIRS
from benchmarks.pairs import BEGIN, END, judge, page_table
from parity import compare_functions, compare_modules, suggest_names
from parity.testing import normal

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks/results/pairs.json").read_text())
PAGE = (ROOT / "docs/pairs.md").read_text()
EXACT = {"dtypes": ["float64"]}
RNGS = nnx.Rngs(0)
FAST = (
    "LayerNorm",
    "ConvTranspose2d(stride=2)",
    "hardsigmoid",
    "clamp(-1, 1) at 1",
    "mse_loss",
    "optim.AdamW",
    "optim.Rprop",
    "optim.Adagrad",
    "OneCycleLR(total_steps=20)",
)
"""Names in PyTorch of the pairs that every run of the tests compares."""


def check(pair):
    for case in pair.cases:
        found = judge(pair, case, tuple(d for d in case.dtypes if d == "float64") or case.dtypes)
        assert found["verdict"] == case.verdict, found


@pytest.mark.parametrize("name", FAST)
def test_the_verdicts_of_fast_pairs(name):
    (pair,) = [pair for pair in PAIRS if pair.torch == name]
    check(pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.torch}, {pair.jax}")
def test_the_verdicts_of_all_pairs(pair):
    check(pair)


def test_the_page_has_the_results():
    assert PAGE.partition(BEGIN)[2].partition(END)[0] == "\n" + page_table(RESULTS["pairs"])
    assert [(p["torch"], p["jax"]) for p in RESULTS["pairs"]] == [(p.torch, p.jax) for p in PAIRS]
    cases = [case for pair in RESULTS["pairs"] for case in pair["cases"]]
    words = " ".join(PAGE.split())
    assert f"{len(PAIRS)} pairs in {len(cases)} comparisons" in words
    assert RESULTS["environment"]["date"][:10] in words
    for library in ("torch", "jax", "flax", "optax"):
        assert f"{library} {RESULTS['environment']['versions'][library]}" in words


def test_every_difference_is_removed_by_another_case():
    for pair in RESULTS["pairs"]:
        verdicts = {case["verdict"] for case in pair["cases"]}
        assert all(case["verdict"] == case["stated"] for case in pair["cases"]), pair["torch"]
        assert EQUAL in verdicts, pair["torch"]
        assert bool(pair["why"]) == (verdicts != {EQUAL}), pair["torch"]


class BeforeNorm(nn.Module):
    """A bias whose gradient is 0, because a normalisation follows."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.linear(x))


class JaxBeforeNorm(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 6, rngs=RNGS)
        self.norm = nnx.BatchNorm(6, momentum=0.9, epsilon=1e-5, rngs=RNGS)

    def __call__(self, x):
        return self.norm(self.linear(x))


def test_a_gradient_that_is_zero_is_no_difference_in_narrow_dtypes():
    torch.manual_seed(0)
    report = compare_modules(BeforeNorm(), JaxBeforeNorm(), [normal((32, 8))], dtypes=["float64", "float32"])
    report.check()
    assert "Not judged: parameter gradient 'linear.bias'" in report.notes[0]


def test_ties_are_reported_as_not_judged():
    report = compare_functions(lambda x: torch.max(x, -1).values, lambda x: jnp.max(x, -1), [np.ones((2, 3))], **EXACT)
    assert "input gradient '0'" in report.notes[0]
    other = compare_functions(lambda x: torch.amax(x, -1), lambda x: jnp.max(x, -1), [normal((2, 3))], **EXACT)
    assert not other.notes


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_recurrent_cells_start_in_the_dtype_of_the_comparison(dtype):
    torch.manual_seed(0)

    class Outputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)
            nn.init.zeros_(self.rnn.bias_hh_l0)

        def forward(self, x):
            return self.rnn(x)[0]

    x = normal((2, 3, 3))
    without = {"ignore": ["rnn.bias_hh_l0", "cell.hn.bias"], "dtypes": [dtype]}
    compare_modules(Outputs(), nnx.RNN(nnx.GRUCell(3, 4, rngs=RNGS)), [x], **without).check()
    layer = linen.RNN(linen.GRUCell(4))
    variables = layer.init(jax.random.key(0), jnp.ones((2, 3, 3), jnp.float32))
    compare_modules(Outputs(), (layer, variables), [x], **without).check()


def test_a_function_around_an_nnx_module_computes_in_float64():
    torch.manual_seed(0)
    linear = nnx.Linear(4, 3, dtype=jnp.float32, rngs=RNGS)
    compare_modules(nn.Linear(4, 3), (lambda module, x: module(x), linear), [normal((2, 4))], **EXACT).check()


def test_names_of_fused_attention():
    found = suggest_names(nn.MultiheadAttention(4, 2), nnx.MultiHeadAttention(2, 4, decode=False, rngs=RNGS))
    parts = ["query", "key", "value"]
    assert dict(found) == {
        "in_proj_weight": {"to": [f"{p}.kernel" for p in parts], "transpose": True, "split": 1, "reshape": [4, 2, 2]},
        "in_proj_bias": {"to": [f"{p}.bias" for p in parts], "reshape": [2, 2]},
        "out_proj.weight": {"to": "out.kernel", "transpose": True, "reshape": [2, 2, 4]},
        "out_proj.bias": "out.bias",
    }


def test_names_of_gates():
    found = suggest_names(nn.LSTM(4, 4), nnx.RNN(nnx.LSTMCell(4, 4, rngs=RNGS)))
    gates = ["cell.ii.kernel", "cell.if_.kernel", "cell.ig.kernel", "cell.io.kernel"]
    assert found["weight_ih_l0"] == {"to": gates, "transpose": True, "split": 1}
    assert found["bias_hh_l0"] == {"to": ["cell.hi.bias", "cell.hf.bias", "cell.hg.bias", "cell.ho.bias"]}
    assert found.unmatched_torch == ("bias_ih_l0",)
    assert not found.ambiguous
    assert not found.unmatched_jax


@pytest.mark.parametrize("channels", [(3, 5), (4, 4)])
def test_kernels_of_convolutions_need_no_names(channels):
    """Equal channels leave the layout of a transposed convolution to the values; a bug does not hide the usual one."""
    torch.manual_seed(0)
    x = normal((2, 6, channels[0]))

    class Last(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x.movedim(-1, 1)).movedim(1, -1)

    transposed = nnx.ConvTranspose(*channels, 3, padding="VALID", rngs=RNGS)
    compare_modules(Last(nn.ConvTranspose1d(*channels, 3)), transposed, [x], **EXACT).check()
    plain = nnx.Conv(*channels, 3, padding="VALID", rngs=RNGS)
    ours = Last(nn.Conv1d(*channels, 3))
    compare_modules(ours, plain, [x], **EXACT).check()
    assert not compare_modules(ours, (lambda m, x: 1.5 * m(x), plain), [x], **EXACT).is_equal


def test_an_operation_that_a_dtype_lacks_is_named():
    def resize(x):
        return nn.functional.interpolate(x, (2, 2), mode="bilinear", antialias=True)

    with pytest.raises(ValueError, match=r"expected operations that exist in bfloat16, got.*pass dtypes without it"):
        compare_functions(
            resize, lambda x: jax.image.resize(x, (1, 1, 2, 2), "linear"), [normal((1, 1, 4, 4))], dtypes=["bfloat16"]
        )
