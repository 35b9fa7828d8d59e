"""Layers wrapped by FSDP2 (fully_shard), whose parameters and gradients are divided, too, have the same gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from reference_torch.rank_pool import RankPool
from reference_torch.transformer import GPTModel
from tests.backends import tiny_corpus
from tests.distributed_optimizer.test_training import CONFIG
from tests.tensor_parallel.test_training import HYPER, SELECTIVE

FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
CASES = {"plain": {}, "selective recompute": {**HYPER, **SELECTIVE}, "full recompute": {**HYPER, **FULL}}


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "full recompute")) for c in CASES])
def test_s2_layers_of_fsdp_have_the_gradients_of_whole_layers(case):
    config = replace(CONFIG, **CASES[case])
    batch = tiny_corpus().batch(0, 4, config.seq_length)
    with RankPool(2) as pool:
        found = pool.run("tests.distributed_optimizer.jobs:gradients_with_fsdp", config, batch)
    model = GPTModel(replace(config, recompute_granularity=None, recompute_method=None, recompute_modules=()))
    tokens, targets = (torch.from_numpy(x) for x in (batch.tokens, batch.targets))
    loss = model(tokens, targets, samples=torch.arange(4))
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for losses, gradients in found:
        assert losses == pytest.approx(loss.item(), rel=1e-12)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient is not None
            scale = gradient.abs().max().item()
            np.testing.assert_allclose(gradients[name], gradient.numpy(), rtol=0, atol=1e-12 * scale, err_msg=name)
