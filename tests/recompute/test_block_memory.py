"""What a block keeps, how long blocks are, and when outputs go (R23, R24)."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.plans.recompute import block_length, recompute_blocks
from reference_torch.forward_context import ForwardContext
from reference_torch.hyper_connections import HyperConnectionModule
from reference_torch.recompute import BlockRecomputation, DiscardedActivationError, MHCBlockRecomputeManager, run_block
from reference_torch.recompute.region import slot_at
from reference_torch.transformer import GPTModel
from tests.recompute.model_support import CONFIG, block, call, jiggled, plain, selective, steps
from tests.recompute.support import assert_equal, gradients, is_empty, measure, normal, reader

# R23


class StorageWatch(TorchDispatchMode):
    """Every storage of one size that an operation makes, held weakly."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.seen = nbytes, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() == self.nbytes:
                weak = StorageWeakRef(leaf.untyped_storage())
                if weak.cdata not in self.seen or self.seen[weak.cdata].expired():
                    self.seen[weak.cdata] = weak
        return result

    def resident(self) -> int:
        """How many are alive with their memory."""
        slots = [slot_at(address) for address, weak in self.seen.items() if not weak.expired()]
        return sum(slot is None or slot.is_full for slot in slots)


def run_decoder(model: GPTModel, hidden: Tensor) -> Tensor:
    """The model's blocks, without the contraction at the end."""
    positions = torch.arange(hidden.shape[1])
    streams = HyperConnectionModule.input_expand(hidden, model.config.num_residual_streams)
    for planned in model.decoder.blocks:

        def run(streams, recompute, planned=planned):
            for number in planned.layers:
                streams = model.decoder.layers[str(number)](streams, ForwardContext(positions, recompute=recompute))
            return streams

        streams = run_block(planned, run, streams)
    return streams


@pytest.mark.parametrize("modules", [("mhc",), ("mhc", "layernorm"), ("mhc", "layernorm", "mlp", "core_attn")])
@pytest.mark.parametrize("length", [1, 2, 3, 4, None])
def test_r23_resident_streams_are_those_between_blocks(length, modules):
    config = selective(CONFIG, *modules, mhc_recompute_layer_num=length)
    hidden = normal(0, 2, 7, 16, dtype=torch.float32)
    results = []
    for settings_ in (config, plain(config)):
        model = jiggled(GPTModel(settings_))
        with StorageWatch(2 * 7 * 4 * 16 * 4) as watch:
            output = run_decoder(model, hidden)
        blocks = recompute_blocks(settings_)
        assert len(blocks) == (4 if settings_ != config else math.ceil(4 / (length or block_length(4, 4))))
        if settings_ == config:
            assert watch.resident() == len(blocks) + 1
        else:
            assert watch.resident() >= 1 + 4 * 2
        parameters = list(model.decoder.layers.parameters())
        results.append(gradients(output, [hidden, *parameters]))
    assert_equal(*results)


# R24


def test_r24_default_block_length_is_the_rounded_optimum(monkeypatch):
    def cost(layers, streams, length):
        return streams * layers / length + (streams + 2) * length

    for layers, streams in itertools.product(range(1, 70), (1, 2, 4, 8)):
        length = block_length(layers, streams)
        assert 1 <= length <= layers
        assert length == min(max(round(math.sqrt(streams * layers / (streams + 2))), 1), layers)
        best = min(cost(layers, streams, other) for other in range(1, layers + 1))
        assert cost(layers, streams, length) <= 1.06 * best
    assert block_length(16, 4) == 3


stages_drawn = st.sampled_from([(1, None), (2, None), (2, 2), (3, 1), (1, 1)])


@given(st.integers(1, 12), stages_drawn, st.integers(1, 6) | st.none())
def test_r24_blocks_cut_a_stage_without_crossing_it_and_the_short_one_comes_last(layers, stages, length):
    pp, vp = stages
    per_stage = layers
    assume(length is None or length <= per_stage)
    config = selective(
        replace(
            CONFIG,
            num_layers=per_stage * pp * (vp or 1),
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
        ),
        "mhc",
        mhc_recompute_layer_num=length,
    )
    seen = []
    for pp_rank, vp_stage in itertools.product(range(pp), range(vp or 1)):
        blocks = recompute_blocks(config, vp_stage if vp else None, pp_rank)
        numbers = [number for planned in blocks for number in planned.layers]
        assert numbers == list(range(numbers[0], numbers[0] + per_stage))
        sizes = [len(planned.layers) for planned in blocks]
        wanted = length or block_length(per_stage, 4)
        assert sizes[:-1] == [wanted] * (len(sizes) - 1)
        assert 1 <= sizes[-1] <= wanted
        assert all("residual_streams" in planned.dropped for planned in blocks)
        seen += numbers
    assert sorted(seen) == list(range(config.num_layers))


def test_r24_outputs_go_as_soon_as_forward_has_read_them():
    x = normal(0, 4, 4)
    expected = gradients(reader(block(x * 1, call)[-1]), [x])
    with MHCBlockRecomputeManager() as manager:
        values = [x * 1]
        for function in steps():
            values.append(manager.checkpoint(function, values[-1]))
            manager.discard_consumed(values[-1])
            assert [is_empty(v) for v in values[1:]] == [True] * (len(values) - 2) + [False]
        with pytest.raises(DiscardedActivationError, match="first"):
            values[1].sum()
        loss = reader(values[-1])
        manager.discard_consumed()
        assert is_empty(values[-1])
        manager.discard_all_outputs_and_register_unified_recompute(loss)
    assert_equal(gradients(loss, [x]), expected)


def test_r24_views_of_what_is_kept_are_kept():
    x = normal(0, 4, 4)
    with MHCBlockRecomputeManager() as manager:
        y, z = manager.checkpoint(lambda x: (x.tanh(), x.exp()), x)
        manager.discard_consumed(y.t()[1:])
        assert [is_empty(y), is_empty(z)] == [False, True]
        manager.discard_all_outputs_and_register_unified_recompute(y.view(-1))
        assert not is_empty(y)


def test_r24_forward_peak_is_lower_with_progressive_discarding(monkeypatch):
    config = selective(replace(CONFIG, hidden_size=64, seq_length=64), "mhc", "layernorm", mhc_recompute_layer_num=4)
    model, hidden = GPTModel(config), normal(0, 4, 64, 64, dtype=torch.float32)
    streams = 4 * 64 * 4 * 64 * 4

    def body(mark):
        mark("start")
        output = run_decoder(model, hidden)
        mark("forward")
        return output

    def peak():
        memory = measure(body)
        return memory.peak("start", "forward") - memory.live("start"), memory.live("forward") - memory.live("start")

    progressive, held = peak()
    monkeypatch.setattr(BlockRecomputation, "discard_consumed", lambda self, keep: None)
    at_the_end, held_at_the_end = peak()
    assert progressive < at_the_end - 8 * streams
    assert held == pytest.approx(held_at_the_end, abs=streams / 4)
