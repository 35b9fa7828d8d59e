"""Offload in JAX's pipelines, beside the same pipelines without it.

tests/offload/test_jax_training.py runs this file in a process with four devices, whose number JAX fixes on its first
use.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.offload import action_uses, layer_storages, plan_actions, plan_offload
from diptych.plans.schedule.named import schedule_for
from jax_impl import ops
from jax_impl.offload import is_on_host
from jax_impl.pipeline import OffloadedPipeline, make_pipeline_step
from jax_impl.pipeline.offload import positions_of
from jax_impl.recompute.policies import _scan_counts
from jax_impl.train import Trainer
from jax_impl.transformer import GPTModel
from parity.compare import relative_difference
from parity.tolerances import PARAMETERS
from tests.backends import tiny_corpus
from tests.offload.program_moves import branch_moves

jax.config.update("jax_num_cpu_devices", 4)

PLAIN = TransformerConfig(
    hidden_size=8,
    num_layers=4,
    num_attention_heads=2,
    ffn_hidden_size=8,
    vocab_size=128,
    seq_length=8,
    init_method_std=0.3,
    hidden_dropout=0.2,
    params_dtype="float64",
    pipeline_model_parallel_size=2,
)
MIXED = {"layer_pattern": "attention,attention+gelu,attention", "add_bias_linear": True}
STREAMS = {"enable_hyper_connections": True, "num_residual_streams": 2, "sinkhorn_iterations": 3}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ("mhc", "mlp"), "mhc_recompute_layer_num": 2}
UNEVEN = {"num_layers": 3, "pipeline_model_parallel_layout": "Ett|tL"}
TWICE = {"pipeline_schedule": "interleaved", "virtual_pipeline_model_parallel_size": 2}
SPLIT = {"pipeline_schedule": "zb-h1"}
MOVED = {"enable_activation_offload": True, "activation_offload_min_bytes": 1}
TRAIN = TrainConfig(
    train_iters=5, global_batch_size=4, micro_batch_size=1, lr=3e-3, min_lr=3e-4, lr_warmup_iters=2, eval_iters=1
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ops, "ROUNDS", 3)


def offloaded(config: TransformerConfig, ahead: int = 1, activations: bool = False) -> TransformerConfig:
    flags = MOVED if activations else {}
    return replace(config, enable_tensor_offload=True, tensor_offload_num_prefetch_layers=ahead, **flags)


def made(config: TransformerConfig, m: int, mesh: Mesh | None = None, **options):
    """A step, its parameters where they lie between steps, and a batch."""
    model = GPTModel(unsharded(config))
    step = make_pipeline_step(model, config, mesh, transform="shard_map", **options)
    staged = step.stage_parameters(nnx.split(model, nnx.Param)[1])
    placed = OffloadedPipeline(step, staged, m).place(staged)
    tokens, targets = np.random.default_rng(m).integers(0, 128, (2, m, 2, 8)).astype(np.int32)
    return step, placed, (tokens, targets, 3)


def meshes(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), ("pp", "dp"))


TORN = {"num_layers": 5, "pipeline_model_parallel_layout": "Ett|t|t|tL", **TWICE}
WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}

CASES = {
    "all moved": (offloaded(replace(PLAIN, **UNEVEN, **MIXED), 0, True), 2, {}),
}
SLOW = {
    "split, unlike": (offloaded(replace(PLAIN, **MIXED, **STREAMS, **RECOMPUTED, **SPLIT), 1, True), 3, {}),
    "stages twice, unlike": (offloaded(replace(PLAIN, **MIXED, **TORN)), 2, {}),
    "inputs kept, recomputed": (offloaded(replace(PLAIN, **STREAMS, **RECOMPUTED), 0), 3, {"saves": "inputs"}),
    "activations alone, fused": (replace(PLAIN, **MIXED, **MOVED), 4, {"slots": "fused"}),
    "replicas": (offloaded(replace(PLAIN, **UNEVEN, **STREAMS), 1, True), 2, {"sizes": (2, 2)}),
    "a rank without layers": (
        offloaded(replace(PLAIN, **MIXED, num_layers=3, pipeline_model_parallel_layout="Ettt|L")),
        2,
        {},
    ),
    "whole blocks": (offloaded(replace(PLAIN, **STREAMS, **WHOLE), 1, True), 3, {}),
}


def check(config: TransformerConfig, m: int, options: dict) -> None:
    """Loss and every gradient are those without offload."""
    mesh = meshes(*options.pop("sizes")) if "sizes" in options else None
    stays = {"enable_activation_offload": False, "activation_offload_layers": None}
    plain = replace(config, enable_tensor_offload=False, **stays)
    results = []
    for which in (plain, config):
        step, params, batch = made(which, m, mesh, **options)
        loss, gradients = step(params, *batch)
        results.append((float(loss), jax.tree.leaves(step.join_parameters(gradients))))
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(gradients)} == {"device"}
    assert abs(results[1][0] - results[0][0]) <= 1e-13
    for name, ours, theirs in zip(step.names, results[1][1], results[0][1], strict=True):
        assert np.linalg.norm(theirs) > 0, name
        assert relative_difference(np.asarray(ours), np.asarray(theirs)) <= 1e-13, name


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_without_offload(case):
    config, m, options = CASES[case]
    check(config, m, dict(options))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SLOW)
def test_gradients_are_those_without_offload_in_more_ways(case):
    config, m, options = SLOW[case]
    check(config, m, dict(options))


@pytest.mark.parametrize(
    ("flags", "ahead", "saves"),
    [
        ({**TWICE, "num_layers": 6, "pipeline_model_parallel_layout": "Ett|t|t|ttL", **MIXED}, 1, "residuals"),
        ({**UNEVEN, **MIXED}, 1, "inputs"),
        pytest.param(
            {**SPLIT, **STREAMS, **RECOMPUTED, "num_layers": 5, "pipeline_model_parallel_layout": "Ettt|ttL"},
            0,
            "residuals",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param({**STREAMS, **flags}, ahead, "residuals", marks=pytest.mark.slow)
            for flags, ahead in ((RECOMPUTED, 9), (SPLIT, 1), ({**TWICE, **RECOMPUTED, "num_layers": 8}, 2))
        ),
    ],
)
def test_branches_move_what_the_plan_says(flags, ahead, saves):
    """Of every action, read from the compiled table's branches: the fetches, in order, and nothing else."""
    config = offloaded(replace(PLAIN, **flags), ahead)
    step, params, batch = made(config, 4, saves=saves)
    program = jax.make_jaxpr(step._run)(params, step._batch(*batch))
    positions = positions_of(params)
    order = list(dict.fromkeys(each for each in positions if each is not None))
    numbers = [None if each is None else order.index(each) for each in positions]
    numbers += [None] * (len(program.jaxpr.invars) - len(numbers))
    found = set()
    for moves in branch_moves(program, numbers):
        events = [move.event for move in moves]
        fetches = {move.arrays for move in moves if move.event[0] == "+"}
        assert fetches <= {len([n for n in numbers if n == slot]) for slot in set(numbers)}
        if any(event[0] == "+" for event in events):
            found.add(" ".join(events))
    expected = set()
    for rank, actions in enumerate(schedule_for(config, 4).actions):
        slot_of = {
            layer: order.index((place.kind, vp_stage, place.position))
            for layer, (of, vp_stage, place) in step.stages.by_layer().items()
            if of == rank
        }
        for action in actions:
            uses = action_uses(config, action, rank, replays_stages=saves == "inputs")
            steps = plan_offload(uses, layer_storages(config), ahead, then=()).moves
            events = [[*(f"+{slot_of[layer]}" for layer in s.fetches), str(s.use)] for s in steps]
            if uses:
                expected.add(" ".join(event for step_ in events for event in step_))
    assert found == expected


@pytest.mark.parametrize("flags", [pytest.param({}, marks=pytest.mark.slow), SPLIT])
def test_no_parameter_waits_in_a_slot(flags):
    """Slots hold what they hold without offload."""
    config = replace(PLAIN, **STREAMS, **flags)
    carried_bytes = []
    for which in (config, offloaded(config)):
        step, params, batch = made(which, 3)
        program = jax.make_jaxpr(step._run)(params, step._batch(*batch))
        carried_bytes.append(max(carried(program.jaxpr)))
    assert carried_bytes[0] == carried_bytes[1]


def carried(program) -> list[int]:
    """Bytes of what a loop hands from turn to turn, gradients of parameters not counted."""
    found = []
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            consts, carry = _scan_counts(equation.params)
            values = [v.aval for v in equation.invars[consts : consts + carry]]
            found += [a.size * a.dtype.itemsize for a in values if a.ndim == 2]
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += carried(inner)
    return found


def test_slots_of_activations_lie_on_the_host():
    config = replace(PLAIN, **STREAMS, **MOVED)
    step, params, batch = made(config, 3)
    step.lower(params, *batch)
    assert step.moved.arrays == 2, "token ids, and all else"
    assert step.moved.bytes > 1000
    assert moved_by(few := replace(config, activation_offload_min_bytes=1000)) > 0
    assert moved_by(few) < step.moved.bytes, "each value is compared, not the slot of all"
    assert moved_by(replace(config, activation_offload_min_bytes=step.moved.bytes + 1)) == 0


def moved_by(config: TransformerConfig) -> int:
    step, params, batch = made(config, 3)
    step.lower(params, *batch)
    return step.moved.bytes


def test_values_of_some_layers_lie_on_the_host():
    """Two layers on each rank: what the first and the second save is what both save, without embedding and head."""
    config = replace(PLAIN, **STREAMS, **MOVED, num_layers=4)

    def moved(layers: str | None, **options) -> int:
        step, params, batch = made(replace(config, activation_offload_layers=layers), 3, **options)
        step.lower(params, *batch)
        return step.moved.bytes

    first, second, both = (moved(layers) for layers in ("0,2", "1,3", "0-3"))
    assert 0.8 * first < second < 1.25 * first
    assert first + second == both < moved(None)
    assert moved("0") == first, "the slots of all ranks are as long as the longest"


def test_values_of_some_names_lie_on_the_host():
    """Slots of two names hold what the slots of each hold, and no more than those of all values."""
    config = replace(PLAIN, **STREAMS, **MOVED, num_layers=4)

    def moved(layers: str) -> int:
        step, params, batch = made(replace(config, activation_offload_layers=layers), 3)
        step.lower(params, *batch)
        return step.moved.bytes

    first, second, both = (moved(f"0-3:{names}") for names in ("fc1", "q", "fc1+q"))
    assert 0 < second < first
    assert first + second == both < moved("0-3")
    assert moved("0:fc1,2:fc1") == first // 2, "of one of the two layers of each rank"
    assert moved("0-3:mixed") == 0, "it is not saved"


@pytest.mark.parametrize("case", ["1", "0,3", "0-1:fc1+q,2,3:residual_streams"])
def test_gradients_with_some_layers_on_the_host(case):
    some = {"num_layers": 4, "activation_offload_layers": case}
    check(offloaded(replace(PLAIN, **STREAMS, **RECOMPUTED, **SPLIT, **some, **MOVED), 1, True), 3, {})


def test_lowered_for_a_gpu_it_copies_from_pinned_memory():
    """Copies of parameters are in branches, slots of activations on the host are handed from slot to slot."""
    config = offloaded(replace(PLAIN, num_layers=2, hidden_dropout=0.0), 1, True)
    step, params, batch = made(config, 2)
    traced = step._run.trace(params, step._batch(*batch))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    copies = [line for line in text.splitlines() if "annotate_device_placement" in line]
    to_host = [line for line in copies if "pinned_host" in line]
    stored = 2 * step.moved.arrays  # empty slots, and a forward's
    assert len(to_host) == stored
    fetched = 6 * 2 * config.num_layers  # every layer's six parameters, for forward and for backward
    assert len(copies) >= stored + fetched
    main = next(line for line in text.splitlines() if "@main" in line)
    assert main.count('mhlo.memory_kind = "pinned_host"') >= 6


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("flags", "ahead", "activations"),
    [
        pytest.param({**UNEVEN, **MIXED, "untie_embeddings_and_output_weights": True}, 1, True, marks=pytest.mark.slow),
        pytest.param({**STREAMS, **TWICE, **RECOMPUTED, "num_layers": 8}, 0, False, marks=pytest.mark.slow),
        pytest.param({**STREAMS, **SPLIT}, 9, True, marks=pytest.mark.slow),
    ],
)
def test_training_is_that_without_offload(flags, ahead, activations, tmp_path):
    """Steps, statistics, validation; and each goes on from the other's checkpoint, also the single-device model."""
    config = replace(PLAIN, **flags)
    plain, moved = (Trainer(c, TRAIN, tiny_corpus()) for c in (config, offloaded(config, ahead, activations)))
    plans = moved.offload.plans
    for step in range(3):
        a, b = plain.train_step(step), moved.train_step(step)
        assert b.loss == pytest.approx(a.loss, rel=1e-13)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-13)
        assert kinds(moved) == {True: {"pinned_host"}, False: {"device"}}
    assert_same(moved, plain)
    stats, storages = moved.offload_statistics, layer_storages(config)
    assert moved.validation_loss() == pytest.approx(plain.validation_loss(), rel=1e-13)
    forwards_in = sum(plan_actions(moved.config, 4, rank, forward_only=True).bytes_in for rank in range(2))
    assert moved.offload_statistics["bytes_in"] == stats["bytes_in"] + forwards_in

    forwards = sum(action.kind == "F" for actions in schedule_for(config, 4).actions for action in actions)
    activation_bytes = 3 * forwards * moved._pipeline.moved.bytes
    assert (activation_bytes > 0) == activations
    assert stats["bytes_in"] == 3 * sum(plan.bytes_in for plan in plans) + activation_bytes
    assert stats["bytes_out"] == 3 * sum(plan.bytes_out for plan in plans) + activation_bytes
    assert stats["hits"] + stats["misses"] == 3 * sum(len(plan.moves) for plan in plans)
    layers = sum(sum(sizes.values()) for sizes in storages.values())
    padding = 1 if "pipeline_model_parallel_layout" in flags else 0  # rank 1 has one layer where rank 0 has two
    assert sum(plan.bytes_out for plan in plans) == layers + padding * sum(storages[1].values())
    for rank, plan in enumerate(plans):
        assert plan.moves[: len(plan_actions(config, 4, rank).moves)] == plan_actions(moved.config, 4, rank).moves

    paths = {one: one.save(tmp_path / name) for one, name in ((plain, "plain"), (moved, "moved"))}
    alone = Trainer(unsharded(config), TRAIN, tiny_corpus())
    assert moved.resume(paths[plain]) == plain.resume(paths[moved]) == alone.resume(paths[moved]) == 3
    assert kinds(moved) == {True: {"pinned_host"}, False: {"device"}}
    losses = [trainer.train_step(3).loss for trainer in (plain, moved, alone)]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-10)
    assert_same(moved, plain)


def test_statistics_are_what_the_plans_say_times_the_steps():
    """Of all devices: parameters by the plans, activations by what the traced program moves, peaks of one device."""
    config, replicas = offloaded(replace(PLAIN, **UNEVEN), 1, True), 2
    step, params, batch = made(config, 4, meshes(2, replicas))
    offload = OffloadedPipeline(step, params, 4)
    assert offload.stats["bytes_in"] == offload.stats["bytes_out"] == 0
    step.lower(params, *batch)
    offload.steps_run = 3
    forwards = sum(action.kind == "F" for actions in schedule_for(config, 4).actions for action in actions)
    activation_bytes = replicas * forwards * step.moved.bytes
    assert activation_bytes > 0
    trained = offload.stats
    assert trained["bytes_in"] == 3 * (replicas * sum(plan.bytes_in for plan in offload.plans) + activation_bytes)
    assert trained["bytes_out"] == 3 * (replicas * sum(plan.bytes_out for plan in offload.plans) + activation_bytes)
    assert trained["hits"] + trained["misses"] == 3 * replicas * sum(len(plan.moves) for plan in offload.plans)
    offload.forwards_run = 2
    evaluations = [plan_actions(config, 4, rank, forward_only=True) for rank in range(2)]
    assert offload.stats["bytes_in"] == trained["bytes_in"] + 2 * replicas * sum(p.bytes_in for p in evaluations)
    assert offload.stats["bytes_out"] == trained["bytes_out"]
    assert OffloadedPipeline(made(PLAIN, 4)[0], params, 4).stats["bytes_in"] == 0


def kinds(trainer: Trainer) -> dict[bool, set[str]]:
    """Memory kinds of parameters, by whether they are a layer's; moments and everything else is on the device."""
    layers, replicated = trainer._params
    for leaf in jax.tree.leaves(trainer._optimizer_state):
        assert leaf.sharding.memory_kind == "device"
    return {
        is_layer: {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}
        for is_layer, tree in ((True, layers), (False, replicated))
    }


def assert_same(moved: Trainer, plain: Trainer) -> None:
    """Parameters after AdamW, as near as any two programs that compute one thing come (parity.tolerances).

    What is left of the gradients of alpha and bias where they cancel differs by rounding, and AdamW makes any gradient
    large: the worst seen is 1.7e-12, an alpha's after three steps. The gradients themselves are within 1e-13, above.
    """
    theirs = plain.parameters()
    for name, ours in moved.parameters().items():
        assert relative_difference(ours, theirs[name]) <= PARAMETERS["float64"], name


def test_what_does_not_go_together_is_refused():
    model = GPTModel(unsharded(PLAIN))
    with pytest.raises(ValueError, match=r"transform: expected 'shard_map' with enable_tensor_offload, got 'pmap'"):
        make_pipeline_step(model, offloaded(PLAIN), transform="pmap")
    with pytest.raises(ValueError, match=r"saves: expected 'residuals' with enable_activation_offload, got 'inputs'"):
        make_pipeline_step(model, replace(PLAIN, **MOVED), saves="inputs")


@pytest.mark.slow
def test_a_step_takes_parameters_from_either_memory():
    config = offloaded(replace(PLAIN, **MIXED))
    step, params, batch = made(config, 2)
    device = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), params)
    assert any(map(is_on_host, jax.tree.leaves(params)))
    assert not any(map(is_on_host, jax.tree.leaves(device)))
    (loss, ours), (again, theirs) = step(params, *batch), step(device, *batch)
    assert float(loss) == float(again)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
