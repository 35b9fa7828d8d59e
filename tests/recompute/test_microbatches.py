"""Losses on activations inside blocks, and microbatches in flight (R25, R26)."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F

from reference_torch.recompute import MHCBlockRecomputeManager
from reference_torch.transformer import GPTModel
from tests.recompute.model_support import CONFIG, TOKENS, block, call, jiggled, plain, selective
from tests.recompute.support import assert_equal, gradients, is_empty, normal, reader

# R25


@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("when", ["same", "before", "after", "same, weighted alone"])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_r25_an_auxiliary_loss_on_an_activation_inside_a_block(place, when, scoped, refill):
    def run(recompute: bool):
        x = normal(0, 4, 4)
        manager = MHCBlockRecomputeManager()
        with manager if recompute and scoped else contextlib.nullcontext():
            values = block(x * 1, manager.checkpoint if recompute else call)
            auxiliary = (values[place] ** 2).sin().mean(0) * values[place][1]
            output = values[-1] * 1
            if recompute:
                hook = output if scoped else torch.cat([output.flatten(), auxiliary])
                manager.discard_all_outputs_and_register_unified_recompute(hook)
                assert is_empty(values[place])
        main = reader(output)
        if when == "same":
            return gradients([main, auxiliary], [x])
        if when == "same, weighted alone":
            return gradients(main.sin().mean() + 0.3 * auxiliary.square().mean(), [x])
        first, second = (auxiliary, main) if when == "before" else (main, auxiliary)
        return [*gradients(first, [x], seed=1, retain_graph=True), *gradients(second, [x], seed=2)]

    assert_equal(run(True), run(False))


# R26


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_r26_microbatches_in_flight_go_backward_in_any_order(order):
    config = selective(CONFIG, "mhc", "layernorm", "activation", mhc_recompute_layer_num=3)
    results = []
    for settings_ in (config, plain(config)):
        model = jiggled(GPTModel(settings_))
        logits = [model(TOKENS.roll(i, 1), step=i, samples=torch.tensor([2 * i, 2 * i + 1])) for i in range(3)]
        for i in order:
            logits[i].backward(normal(i, *logits[i].shape, dtype=torch.float32, grad=False))
            logits[i] = None
        results.append([p.grad for p in model.parameters()])
    assert_equal(*results)


def test_r26_each_microbatch_replays_its_own(trace):
    x, log = normal(0, 4, 4), []
    losses = []
    for microbatch in range(3):
        with MHCBlockRecomputeManager() as manager:

            def named(x, microbatch=microbatch):
                log.append(microbatch)
                return F.dropout(x, 0.5).tanh()

            torch.manual_seed(microbatch)
            loss = reader(manager.checkpoint(named, x * (microbatch + 1)))
            manager.discard_all_outputs_and_register_unified_recompute(loss)
            losses.append(loss)
    del log[:]
    for i in (1, 2, 0):
        torch.manual_seed(i)
        expected = gradients(reader(F.dropout(x * (i + 1), 0.5).tanh()), [x])
        assert_equal(gradients(losses[i], [x]), expected)
    assert log == [1, 2, 0]
