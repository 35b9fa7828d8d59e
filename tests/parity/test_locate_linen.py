"""Features of linen models that locate supports: setup and compact modules, transformations, statistics."""

import jax
import numpy as np
import pytest
import torch
from flax import linen
from torch import nn

from parity import locate
from tests.parity.test_locate_features import TorchStack

TOKENS = np.random.default_rng(1).integers(0, 7, (3, 5))


class Setup(linen.Module):
    """Submodules of setup, a second method, batch statistics, and a layer inside a transformation."""

    middle: type
    wrong: str = ""

    def setup(self):
        self.emb = linen.Embed(7, 4)
        self.norm = linen.BatchNorm(use_running_average=True, epsilon=1e-4 if self.wrong == "norm" else 1e-5)
        self.mid = self.middle(4)

    def __call__(self, tokens):
        x = self.mid(self.norm(self.emb(tokens)))
        return self.emb.attend(1.001 * x if self.wrong == "" else x)


class Compact(linen.Module):
    middle: type
    wrong: str = ""

    @linen.compact
    def __call__(self, tokens):
        emb = linen.Embed(7, 4, name="emb")
        norm = linen.BatchNorm(use_running_average=True, epsilon=1e-4 if self.wrong == "norm" else 1e-5, name="norm")
        x = self.middle(4, name="mid")(norm(emb(tokens)))
        return emb.attend(1.001 * x if self.wrong == "" else x)


class TorchNormed(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.mid = middle

    def forward(self, tokens):
        x = self.norm(self.emb(tokens).transpose(1, 2)).transpose(1, 2)
        return self.mid(x) @ self.emb.weight.T


class Step(linen.Module):
    features: int

    @linen.compact
    def __call__(self, x, _):
        return linen.Dense(self.features, name="layer")(x), None


def scan_of_linen(features, name=None):
    scan = linen.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
    return Unpacked(scan, features, name=name)


class Unpacked(linen.Module):
    scan: type
    features: int

    @linen.compact
    def __call__(self, x):
        return self.scan(self.features, name="steps")(x, None)[0]


LINEN = {
    "setup": (Setup, linen.Dense, lambda: nn.Linear(4, 4)),
    "compact": (Compact, linen.Dense, lambda: nn.Linear(4, 4)),
    "remat": (Compact, linen.remat(linen.Dense), lambda: nn.Linear(4, 4)),
    "jit": (Setup, linen.jit(linen.Dense), lambda: nn.Linear(4, 4)),
    "scan": (Compact, scan_of_linen, TorchStack),
}
LINEN_SCAN = {
    "mid.layers.*.weight": {"to": "mid.steps.layer.kernel", "stack": 0, "transpose": True},
    "mid.layers.*.bias": {"to": "mid.steps.layer.bias", "stack": 0},
}


@pytest.mark.parametrize("name", LINEN)
@pytest.mark.parametrize("wrong", ["no", "norm", ""])
def test_linen(name, wrong):
    kind, middle, other = LINEN[name]
    torch.manual_seed(0)
    first = TorchNormed(other()).eval()
    first.norm.running_mean.normal_()
    first.norm.running_var.uniform_(0.5, 2.0)
    model = kind(middle, wrong)
    names = {
        "norm.running_mean": "batch_stats.norm.mean",
        "norm.running_var": "batch_stats.norm.var",
        "norm.weight": "norm.scale",
        "emb.weight": "emb.embedding",
        "norm.bias": "norm.bias",
    }
    names |= LINEN_SCAN if name == "scan" else {"mid.weight": {"to": "mid.kernel", "transpose": True}}
    inputs = [TOKENS]
    found = locate(first, (model, model.init(jax.random.key(0), TOKENS)), inputs, names=names)
    assert (found.point and found.point.path) == {"no": None, "norm": "norm", "": ""}[wrong], found
    if wrong == "norm":
        assert not found.local.is_equal
        assert {row.kind for row in found.local.rows} == {"output", "input gradient", "parameter gradient"}
