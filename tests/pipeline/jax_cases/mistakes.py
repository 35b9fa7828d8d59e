"""Steps and batches that do not fit are refused by name."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jax_impl.pipeline import make_pipeline_step
from jax_impl.transformer import GPTModel
from tests.pipeline.jax_cases.support import PLAIN, TWICE_TWO, batch_of, devices, model_of


def test_step_refuses_what_does_not_fit():
    config = replace(PLAIN, num_layers=2, pipeline_model_parallel_size=2)
    model = model_of(config)
    make = partial(make_pipeline_step, model, config)
    with pytest.raises(ValueError, match=r"transform: expected one of \('pmap', 'shard_map'\), got 'pjit'"):
        make(transform="pjit")
    with pytest.raises(ValueError, match=r"saves: expected one of \('inputs', 'residuals'\), got 'all'"):
        make(saves="all")
    with pytest.raises(ValueError, match=r"slots: expected one of \('canonical', 'fused'\), got 'loose'"):
        make(slots="loose")
    with pytest.raises(ValueError, match=r"fused: expected False with schedule 'gpipe'"):
        make_pipeline_step(model, replace(config, pipeline_schedule="gpipe"), slots="fused")
    with pytest.raises(ValueError, match=r"mesh: expected an axis 'pp' of size .*=2, .* got \{'pp': 4\}"):
        make(Mesh(devices(4), ("pp",)))
    with pytest.raises(ValueError, match=r"mesh: expected an axis 'pp' of size .*=2, .* got \{'pp': 2, 'ep': 2\}"):
        make(Mesh(devices(2, 2), ("pp", "ep")), transform="shard_map")
    with pytest.raises(
        ValueError, match=r"mesh: .* 'tp' of size tensor_model_parallel_size=1, got \{'pp': 2, 'tp': 2\}"
    ):
        make(Mesh(devices(2, 2), ("pp", "tp")), transform="shard_map")
    with pytest.raises(
        ValueError, match=r"transform: expected 'shard_map' with a mesh .*, got 'pmap', .* alone; pass transform"
    ):
        make(Mesh(devices(2, 2), ("dp", "pp")), transform="pmap")
    with pytest.raises(ValueError, match=r"model: expected the single-device model of config, .*unsharded\(config\)"):
        make_pipeline_step(GPTModel(config, post_process=False), config)
    many = replace(PLAIN, num_layers=9, pipeline_model_parallel_size=9)
    with pytest.raises(ValueError, match=r"expected at most the 8 devices JAX has, got 9; on a CPU call .*, 9\)"):
        make_pipeline_step(model_of(many), many)


def test_batches_are_checked():
    config = replace(PLAIN, num_layers=4, **{k: v for k, v in TWICE_TWO.items() if "layout" not in k})
    model = model_of(config)
    mesh = Mesh(devices(2, 2), ("dp", "pp"))
    step = make_pipeline_step(model, config, mesh, "shard_map")
    staged = step.stage_parameters(nnx.split(model, nnx.Param)[1])
    tokens, targets = batch_of(4)
    with pytest.raises(ValueError, match=r"tokens: expected \[microbatches, .*\], none of them 0, got shape \(2, 8\)"):
        step(staged, tokens[0], targets[0])
    with pytest.raises(ValueError, match=r"targets: expected the shape of tokens, \(4, 2, 8\), got \(3, 2, 8\)"):
        step(staged, tokens, targets[1:])
    with pytest.raises(ValueError, match=r"samples: expected one number per sequence, shape \(4, 2\), got \(2,\)"):
        step(staged, tokens, targets, 0, np.arange(2))
    with pytest.raises(ValueError, match=r"'dp' of size 2 divides, got 1 per microbatch; change either"):
        step(staged, tokens[:, :1], targets[:, :1])
    with pytest.raises(ValueError, match=r"num_microbatches: .* got 3 in groups of 2, which leaves 1"):
        step(staged, tokens[:3], targets[:3])
    with pytest.raises(ValueError, match=r"inputs: expected at most seq_length=8 tokens, got 16"):
        step(staged, *(np.concatenate([x, x], -1) for x in (tokens, targets)))
