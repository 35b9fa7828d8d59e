"""Pipelines of others' models: split from outside, under every schedule, with what users wrap around stages."""

import pytest

from reference_torch.rank_pool import RankPool
from tests.everywhere.pipeline_jobs import Case, unsharded
from tests.everywhere.torch_models import NAMES

JOB = "tests.everywhere.pipeline_jobs:run"

CUTS = {
    "Llama": ("model.layers.1", "model.layers.2", "lm_head"),
    "GPT-2": ("transformer.h.0", "transformer.h.1", "transformer.h.2"),
    "Qwen3.5": ("model.layers.1", "model.layers.2", "model.layers.3"),
    "ViT": ("vit.layers.1", "vit.layers.2", "classifier"),
    "ResNet": ("resnet.encoder.stages.0.layers.1", "resnet.encoder.stages.1", "classifier"),
    "LSTM": ("lstm", "norm", "head"),
    "torchvision ResNet": ("layer1.1", "layer2", "fc"),
    "torchvision ViT": tuple(f"encoder.layers.encoder_layer_{number}" for number in range(3)),
}


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four():
    with RankPool(4) as pool:
        yield pool


def check(pool, case, tolerance=1e-13):
    """Losses on the last stage alone, every gradient and buffer on some rank, as the single-device model has them."""
    expected = unsharded(case)
    outcomes = pool.run(JOB, case)
    count = case.num_microbatches
    with_losses = [outcome.losses for outcome in outcomes if outcome.losses[0]]
    assert len(with_losses) == case.replicas
    for replica, losses in enumerate(with_losses):
        for found, all_losses in zip(losses, expected.losses, strict=True):
            mine = all_losses[replica * count : (replica + 1) * count]
            assert found == pytest.approx(mine, rel=tolerance, abs=tolerance)
    for kind in ("gradients", "buffers"):
        wanted = getattr(expected, kind)
        largest = max((tensor.abs().max() for tensor in wanted.values()), default=1.0)
        assert {name for outcome in outcomes for name in getattr(outcome, kind)} == wanted.keys()
        for outcome in outcomes:
            for name, tensor in getattr(outcome, kind).items():
                assert (tensor - wanted[name]).abs().max() <= tolerance * largest, (kind, name)


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(two, name, schedule):
    cuts = CUTS[name][1:2] if schedule == "1f1b" else CUTS[name]
    check(two, Case(name, cuts, schedule, deallocate=schedule == "zb-v", with_example=schedule == "interleaved"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("name", NAMES)
def test_four_ranks(four, name, schedule):
    check(four, Case(name, CUTS[name], schedule))


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("wrap", ["compile", "checkpoint", "recompute", "autocast"])
def test_wrapped_stages(two, wrap, schedule):
    dtype, tolerance = ("float32", 1e-6) if wrap == "autocast" else ("float64", 1e-13)
    check(two, Case("Llama", CUTS["Llama"][1:2], schedule, wrap=wrap, dtype=dtype), tolerance)


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp", "parts fsdp"])
def test_replicas(four, wrap, schedule):
    check(four, Case("Llama", CUTS["Llama"][1:2], schedule, replicas=2, wrap=wrap))


@pytest.mark.multiprocess
def test_replicas_of_a_tied_embedding(four):
    check(four, Case("GPT-2", CUTS["GPT-2"][1:2], replicas=2, wrap="ddp"))
    check(four, Case("GPT-2", CUTS["GPT-2"][1:2], replicas=2, wrap="fsdp"))
