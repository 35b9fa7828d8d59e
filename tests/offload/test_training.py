"""Offload with recompute, pipelines and several microbatches (O11)."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from diptych.plans.offload import Use, step_uses
from diptych.plans.schedule.csv import schedule_from_csv
from reference_torch.offload import offload_modules
from reference_torch.offload.storage import OffloadedStorage
from reference_torch.pipeline import PipelineExecutor
from reference_torch.rank_pool import RankPool
from reference_torch.recompute import CheckpointWithoutOutput, MHCBlockRecomputeManager, lazy_restore
from tests.offload.support import (
    ACTIVATIONS,
    CONFIG,
    LAYERS,
    MODES,
    Net,
    assert_as_planned,
    assert_equal_state,
    batch,
    build,
    check_a_step,
    train,
)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 9)), 1])
@pytest.mark.parametrize("mode", MODES)
def test_o11_training_with_recompute_and_microbatches(mode, n):
    """The trainer's whole step: numbers, moves, bytes."""
    check_a_step(replace(CONFIG, **MODES[mode], tensor_offload_num_prefetch_layers=n))


PIPELINES = {
    "1f1b": {"pipeline_model_parallel_layout": "Ettt|ttL"},
    "interleaved": {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tt|t|tL"},
    "zb-h1, full recompute": {"pipeline_schedule": "zb-h1", "pipeline_model_parallel_layout": "Ettt|ttL"}
    | MODES["full"],
    "zb-h1": {"pipeline_schedule": "zb-h1", "pipeline_model_parallel_layout": "Ettt|ttL"} | ACTIVATIONS,
    "1f1b, mhc recomputed": {"pipeline_model_parallel_layout": "Ettt|ttL"} | MODES["mhc"] | ACTIVATIONS,
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("names", [["zb-h1"], pytest.param([*PIPELINES], marks=pytest.mark.slow)], ids=["zb-h1", "all"])
def test_o11_pipelines(names):
    """Every rank moves what its part of the schedule says, with several microbatches in flight."""
    with RankPool(2) as pool:
        for name in names:
            check_a_step(replace(CONFIG, **PIPELINES[name], pipeline_model_parallel_size=2), pool)


SPLIT_TABLE = "0F0,1F0,1I0,0I0,0F1,1F1,1W0,1I1,0W0,0I1,1W1,0W1"
"""Two stages on one rank; W of the first microbatch comes after other layers have run."""


def _stages():
    torch.manual_seed(0)
    return [nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))) for _ in range(2)]


@pytest.mark.parametrize("parameters", [False, True])
def test_gradients_on_the_host_and_a_split_backward(parameters):
    """W would add to a gradient on the host, so I computes the gradients of these layers."""
    plain, ours = _stages(), _stages()
    settings = {"parameters": parameters, "gradients": True, "num_prefetch_layers": 0}
    managers = [offload_modules(stage, ["*"], **settings) for stage in ours]
    for _ in range(3):
        for stages in (plain, ours):
            table = schedule_from_csv(SPLIT_TABLE)
            pipeline = PipelineExecutor(stages, table, loss_fn=lambda out, target: out.square().sum())
            pipeline.step([torch.linspace(0, 1 + n, 16).view(2, 8) for n in range(2)])
        for a, b in zip(*(nn.ModuleList(stages).parameters() for stages in (plain, ours)), strict=True):
            assert torch.equal(a.grad, b.grad)
    for manager, stage in zip(managers, ours, strict=True):  # 3 steps of 2 microbatches; parameters do not change
        assert manager.stats["bytes_out"] == 3 * 2 * sum(parameter.nbytes for parameter in stage.parameters())
        manager.close()


def test_o11_several_microbatches_in_flight(managers):
    """Forwards of three before the first backward, backwards in another order."""
    results = []
    for model in (build(), build()):
        if results:
            manager = managers(model, 1)
            uses = [Use("F", n) for n in range(LAYERS)] * 3 + [Use("B", n) for n in reversed(range(LAYERS))] * 3
            manager.expect(uses)
        losses = [model(batch(step)).square().mean() for step in range(3)]
        for place in (1, 2, 0):
            losses[place].backward()
        results.append([p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert_as_planned(manager, uses, step_uses(range(LAYERS))[2 * LAYERS :])


@pytest.mark.parametrize("reentrant", [False, True])
def test_o11_checkpoints_of_pytorch(reentrant, managers):
    class Checkpointed(Net):
        def forward(self, x):
            x = self.first(x)
            x = checkpoint(lambda y: self.layers[1](self.layers[0](y)), x, use_reentrant=reentrant)
            x = checkpoint(self.layers[2], x, use_reentrant=reentrant)
            x = self.layers[4](self.layers[3](x))
            return self.head(x)

    plain, ours = build(kind=Checkpointed), build(kind=Checkpointed)
    manager = managers(ours, 0)
    train(ours, 3, manager)
    train(plain, 3)
    assert_equal_state(ours, plain)
    assert manager.stats["peak_layers"] == 1


def _checkpointed(run, x):
    return checkpoint(run, x, use_reentrant=False)


def _checkpointed_reentrant(run, x):
    return checkpoint(run, x, use_reentrant=True)


def _region(run, x):
    region = CheckpointWithoutOutput()
    inner = region.checkpoint(run, x)
    y = inner * 1.0
    region.discard_output_and_register_recompute(y)
    return y


def _manager_of_regions(run, x):
    regions = MHCBlockRecomputeManager()
    for layer in run:
        region = CheckpointWithoutOutput()
        x = region.checkpoint(layer, x)
        regions.add_checkpoint(region)
    y = x * 1.0
    regions.discard_all_outputs_and_register_unified_recompute(y)
    return y


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", [_checkpointed, _checkpointed_reentrant, _region, _manager_of_regions])
def test_o4_blocks_that_are_recomputed_keep_to_n_and_one_layer(way, size, n, managers):
    """Where nobody announces the replays: a backward that waits for one gives its place up."""

    class Blocks(Net):
        def forward(self, x):
            x = self.first(x)
            for k in range(0, len(self.layers), size):
                x = way(nn.Sequential(*self.layers[k : k + size]), x)
            return self.head(x)

    plain, ours = build(6, kind=Blocks), build(6, kind=Blocks)
    manager = managers(ours, n)
    moved = []
    for _ in range(3):
        before = manager.stats["bytes_in"]
        train(ours, 1, manager)
        train(plain, 1)
        moved.append(manager.stats["bytes_in"] - before)
    assert_equal_state(ours, plain)
    assert manager.stats["peak_layers"] == n + 1
    assert manager.stats["peak_bytes"] == (n + 1) * sum(manager.storages()[0].values())
    assert manager.stats["retained"] == {}
    assert moved[2] <= moved[0], "replays are learnt"


@pytest.mark.parametrize("lazy", [False, True])
def test_o11_regions_that_span_layers(lazy, managers):
    class Regions(Net):
        def forward(self, x):
            x = self.first(x)
            with lazy_restore() if lazy else torch.enable_grad():
                region = CheckpointWithoutOutput()
                inner = region.checkpoint(lambda y: self.layers[1](self.layers[0](y)), x)
                x = self.layers[3](self.layers[2](inner))
                region.discard_output_and_register_recompute(x)
                return self.head(self.layers[4](x))

    plain, ours = build(kind=Regions), build(kind=Regions)
    train(ours, 3, managers(ours, 0))
    train(plain, 3)
    assert_equal_state(ours, plain)


def test_o11_saved_tensor_hooks_outside_get_everything_else(managers):
    plain, ours = build(), build()
    managers(ours, 0)
    weights = {p.untyped_storage()._cdata for layer in ours.layers for p in layer.parameters()}
    packed = []
    for model in (plain, ours):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
            out = model(batch())
        out.sum().backward()
    assert not {t.untyped_storage()._cdata for t in packed} & weights
    assert len(packed) > 4 * LAYERS
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_an_update_does_not_wait_for_the_gradients_of_its_own_layer(managers, monkeypatch):
    """If the update writes them, they are copied to the host while the next layer is updated."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(size, size + 1) for size in (8, 9, 10, 11))
    manager = managers(layers, gradients=True)
    events = []

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            events.append(("updated", 0))
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.mul_(2.0)  # the host has no copy of what it is now
            return super().step(closure)

    optimizer = Optimizer(layers.parameters(), lr=0.1)
    real = OffloadedStorage.finish_eviction

    def finish(memory):
        if memory._outgoing is not None and memory.name.startswith("gradient of shape"):
            events.append(("left", memory.nbytes))
        real(memory)

    x = torch.randn(2, 8)
    for layer in layers:
        x = layer(x)
    x.sum().backward()
    monkeypatch.setattr(OffloadedStorage, "finish_eviction", finish)
    manager.step(optimizer, is_per_parameter=True)
    weights = [("left", layer.weight.nbytes) for layer in layers]
    updates = [place for place, event in enumerate(events) if event[0] == "updated"]
    updates = updates[1:]  # the first is that of parameters of no layer
    assert len(updates) == len(layers)
    for number, weight in enumerate(weights):
        last = max(place for place, event in enumerate(events) if event == weight)
        assert last > updates[min(number + 1, len(layers) - 1)]
