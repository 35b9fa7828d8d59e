"""The parts of parameters that tensor-parallel ranks hold fit the models of ranks, and give back the unsharded ones."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.plans.config import TransformerConfig
from diptych.plans.model.layers import parse_layer
from diptych.plans.model.parameters import Split, parameter_specs
from diptych.plans.tensor_parallel import (
    gradient_is_partial,
    is_repeated,
    join_parts,
    rank_config,
    rank_part,
    repeated_entries,
    share_counted,
)

CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=7,
    num_attention_heads=4,
    num_query_groups=2,
    layer_pattern="attention,gdn+gelu+ffn=12,kda+moe,attention+post-norm+moe,mla,gdn+no-mlp-hc,attention+no-attention-hc",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_moe_experts=4,
    moe_ffn_hidden_size=8,
    moe_shared_expert_intermediate_size=12,
    moe_shared_expert_gate=True,
    add_bias_linear=True,
    qk_layernorm=True,
    qk_layernorm_scope="projection",
    attention_output_gate=True,
    enable_hyper_connections=True,
    kv_lora_rank=6,
    qk_head_dim=4,
    qk_pos_emb_head_dim=2,
    v_head_dim=4,
    rotary_percent=0.0,
    vocab_size=64,
    seq_length=16,
)
LAYER = "decoder.layers.0."


@pytest.mark.parametrize("size", [2, 4])
def test_the_model_of_a_rank_has_parameters_of_the_shapes_of_its_parts(size):
    config = replace(CONFIG, tensor_model_parallel_size=size)
    unsharded = parameter_specs(CONFIG)
    part = parameter_specs(rank_config(config))
    assert unsharded.keys() == part.keys()
    for name, spec in unsharded.items():
        assert rank_part(np.zeros(spec.shape), spec.split, size, 0).shape == part[name].shape, name


def test_the_layers_of_a_rank_differ_in_their_widths_alone():
    part = rank_config(replace(CONFIG, tensor_model_parallel_size=2))
    for number in range(CONFIG.num_layers):
        layer = CONFIG.layer(number)
        assert part.layer(number) == replace(layer, ffn_hidden_size=layer.ffn_hidden_size // 2)
        assert parse_layer(layer.description, CONFIG.layer_defaults) == layer


SPLITS = st.builds(
    Split,
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3)), min_size=1, max_size=3),
)


@given(SPLITS, st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_parts_give_back_the_unsharded_array_and_count_every_entry_once(split, size, seed):
    split = split._replace(sections=tuple(split.sections))
    length = sum(units * width for units, width in split.sections)
    shape = [2, 3, 2]
    shape[split.axis] = length
    unsharded = np.random.default_rng(seed).standard_normal(shape)
    parts = [rank_part(unsharded, split, size, rank) for rank in range(size)]
    np.testing.assert_array_equal(join_parts(parts, split), unsharded)
    counts = [share_counted(split, size, rank) for rank in range(size)]
    counted = sum(np.moveaxis(part, split.axis, -1) @ count for part, count in zip(parts, counts, strict=True))
    np.testing.assert_allclose(counted, unsharded.sum(split.axis), atol=1e-12)


@given(SPLITS, st.sampled_from([2, 4, 8]))
def test_repeated_entries_are_those_that_several_ranks_hold(split, size):
    split = split._replace(axis=0, sections=tuple(split.sections))
    length = sum(units * width for units, width in split.sections)
    parts = [rank_part(np.arange(length), split, size, rank) for rank in range(size)]
    holders = np.bincount(np.concatenate(parts), minlength=length)
    seen = {}
    for rank, part in enumerate(parts):
        held, places, total = repeated_entries(split, size, rank)
        assert sorted(part[held]) == [entry for entry in sorted(part) if holders[entry] > 1]
        assert total == (holders > 1).sum()
        for entry, place in zip(part[held], places, strict=True):
            assert seen.setdefault(entry, place) == place  # the same place on every rank
    assert len(set(seen.values())) == len(seen)
    assert is_repeated(split, size) == bool(seen)


@pytest.mark.parametrize(
    ("name", "all_tokens", "own_tokens"),
    [
        (f"{LAYER}input_layernorm.weight", False, True),
        (f"{LAYER}mlp_hyper_connection.phi", False, True),
        (f"{LAYER}self_attention.linear_proj.bias", False, True),
        (f"{LAYER}mlp.linear_fc2.bias", False, True),
        ("decoder.final_layernorm.weight", False, True),
        (f"{LAYER}self_attention.linear_qkv.weight", True, True),
        (f"{LAYER}self_attention.q_layernorm.weight", True, True),
        (f"{LAYER}mlp.router.weight", True, True),
        (f"{LAYER}mlp.shared_experts.linear_fc2.bias", True, True),
    ],
)
def test_gradients_are_partial_inside_of_regions_and_where_ranks_have_different_tokens(name, all_tokens, own_tokens):
    assert gradient_is_partial(name, sequence_parallel=False) == all_tokens
    assert gradient_is_partial(name, sequence_parallel=True) == own_tokens
