"""Random accepted configurations, compared with the plain model on one device.

A draw fixes features of two dimensions and adds every other dimension with a probability. One step of the composition
on its ranks is compared with one step of the plain model in PyTorch on one device: loss, every gradient, every
parameter after the step of AdamW, and the loss of the next batch. In PyTorch, a composition also saves a checkpoint
after the step, a new trainer reads it, and takes a second step.

    python -m tests.composition_report        # runs hundreds, and writes the covered pairs to docs/composition.md
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import reject
from hypothesis import strategies as st

from diptych.plans import amax_history
from diptych.plans.amax_history import is_history
from diptych.plans.checkpoint import read_checkpoint
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.fp8 import BLOCK
from diptych.plans.model.data import Corpus
from diptych.plans.training import check_trainable
from parity.compare import relative_difference
from parity.tolerances import GRADIENT, LOSS
from reference_torch.rank_pool import RankPool
from tests.backends import tiny_corpus
from tests.rank_processes import end_groups
from tests.test_documents import corpus_of_documents

BASE = TransformerConfig(
    hidden_size=8,
    num_layers=2,
    num_attention_heads=2,
    seq_length=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    mhc_init_gating_factor=0.3,
    init_method_std=0.2,
    params_dtype="float64",
    pipeline_timeout=30.0,
)
MAX_RANKS = 16
"""Ranks of the largest mesh: two replicas, context ranks, tensor-parallel ranks and stages."""
SEQUENCES = 8
"""Sequences of a step, on all replicas together."""
STEP = 5
"""Number of the batch of the step."""
NEXT = 6
"""Number of the batch of the loss after the step."""


class Composition(NamedTuple):
    """A configuration, its number of replicas and its corpus."""

    model: TransformerConfig
    train: TrainConfig
    replicas: int
    documents: bool
    features: tuple[str, ...]
    """Names of its features, as in FEATURES."""

    @property
    def ranks(self) -> int:
        """Return the number of processes in PyTorch, or devices in JAX."""
        return self.replicas * self.model.model_parallel_size


class Outcome(NamedTuple):
    """The results of one step."""

    loss: float
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    """Parameters after the step."""
    next_loss: float
    """Loss of the next batch after the step."""
    resumed: dict[str, np.ndarray] | None = None
    """Parameters and moments after the second step of a trainer that resumed from the checkpoint of the first."""


def _schedule(name: str, virtual: int | None = None) -> dict[str, Any]:
    return {
        "pipeline_schedule": name,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": virtual,
        "num_layers": 4 if virtual else 3,
        "pipeline_model_parallel_layout": None if virtual else "Et|ttL",
    }


def _selective(*modules: str, **more: Any) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules, **more}


def _full(method: str, **more: Any) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 1, **more}


HYPER = {"enable_hyper_connections": True, "num_residual_streams": 2}
_MOVED = {"enable_activation_offload": True, "activation_offload_min_bytes": 1}
DIMENSIONS: dict[str, dict[str, dict[str, Any]]] = {
    "schedule": {
        "gpipe": _schedule("gpipe"),
        "1f1b": _schedule("1f1b"),
        "interleaved": _schedule("interleaved", 2),
        "interleaved-zb1p": _schedule("interleaved-zb1p", 2),
        "zb-h1": _schedule("zb-h1"),
        "zb-h2": _schedule("zb-h2"),
        "zb-v": _schedule("zb-v", 2),
        "v-half": _schedule("v-half", 2),
        "v-min": _schedule("v-min", 2),
        "dualpipe-v": _schedule("dualpipe-v", 2),
    },
    "context": {
        "context ranks": {"context_parallel_size": 2},
        "context ranks, ring": {"context_parallel_size": 2, "cp_exchange": "ring"},
        "context ranks, scan": {"context_parallel_size": 2, "cp_exchange": "scan"},
        "context ranks, zigzag": {"context_parallel_size": 2, "cp_attention_layout": "zigzag"},
        "context ranks, pipelined": {"context_parallel_size": 2, "cp_exchange": "pipelined"},
    },
    "replicas": {"replicas": {"replicas": 2}},
    "tensor": {
        "tensor-parallel ranks": {"tensor_model_parallel_size": 2},
        "tensor-parallel ranks, tokens": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
    "optimizer": {"distributed optimizer": {"use_distributed_optimizer": True}},
    "streams": {
        "mHC": HYPER,
        "mHC of DeepSeek-V4": {**HYPER, "mhc_epsilon": 1e-2, "mhc_transpose_h_res": True, "mhc_head": "learned"},
        "mHC of the MLP": {**HYPER, "do_self_attention_hyper_connection": False},
    },
    "layers": {
        "KDA": {"layer_pattern": "kda,attention"},
        "GDN": {"layer_pattern": "gdn,attention"},
        "GELU": {"layer_pattern": "attention+gelu,attention"},
        "post-norm": {"layer_pattern": "attention+post-norm,attention"},
        "Qwen3-Next": {
            "layer_pattern": "gdn,attention",
            "kv_channels": 8,
            "num_query_groups": 1,
            "rotary_percent": 0.5,
            "qk_layernorm": True,
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "untie_embeddings_and_output_weights": True,
        },
        "experts": {
            "layer_pattern": "gdn+moe,attention+moe",
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 6,
            "moe_shared_expert_intermediate_size": 10,
            "moe_shared_expert_gate": True,
        },
        "experts in groups": {
            "layer_pattern": "attention+moe,kda+moe+gelu",
            "num_moe_experts": 6,
            "moe_router_topk": 3,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 3,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 1.5,
            "moe_aux_loss_coeff": 0.7,
        },
        "Kimi Linear": {
            "layer_pattern": "kda,mla+moe",
            "linear_num_key_heads": 2,
            "rotary_percent": 0.0,
            "kv_lora_rank": 6,
            "qk_head_dim": 4,
            "qk_pos_emb_head_dim": 2,
            "v_head_dim": 5,
            "mla_norm_epsilon": 1e-2,
            "num_moe_experts": 4,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": 8,
            "moe_aux_loss_coeff": 0.3,
        },
        "OLMo-hybrid": {
            "layer_pattern": "gdn,attention+post-norm",
            "rotary_percent": 0.0,
            "qk_layernorm": True,
            "qk_layernorm_scope": "projection",
            "linear_allow_neg_eigval": True,
            "linear_norm_epsilon": 1e-3,
        },
    },
    "recompute": {
        "recompute mhc": {**HYPER, **_selective("mhc")},
        "recompute mhc + layernorm": {**HYPER, **_selective("mhc", "layernorm", mhc_recompute_layer_num=1)},
        "recompute core_attn + mlp": _selective("core_attn", "mlp"),
        "recompute activation": _selective("activation"),
        "recompute some activations": {
            "recompute_activation_function": True,
            "recompute_activation_function_num_layers": 1,
        },
        "recompute whole layers, uniform": _full("uniform"),
        "recompute whole layers, block": _full("block"),
    },
    "parameters offloaded": {
        "parameters offloaded": {"enable_tensor_offload": True},
        "parameters offloaded, none ahead": {
            "enable_tensor_offload": True,
            "tensor_offload_num_prefetch_layers": 0,
        },
    },
    "activations offloaded": {
        "activations offloaded": _MOVED,
        "some activations offloaded": _MOVED | {"activation_offload_layers": "0:fc1+residual_streams+q,1"},
    },
    "documents": {"documents": {"documents": True}},
    "dropout": {"dropout": {"hidden_dropout": 0.3}},
    "precision": {
        "bf16": {"params_dtype": "float32", "bf16": True},
        "FP8": {"params_dtype": "float32", "fp8": "hybrid"},
        "FP8 in blocks": {"params_dtype": "float32", "fp8": "e4m3", "fp8_recipe": "blockwise"},
        "FP8, delayed": {
            "params_dtype": "float32",
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": 2,
        },
    },
    "storage": {
        "saved in 8 bits": {"params_dtype": "float32", "activation_storage": "fp8"},
        "a layer saved in 8 bits": {
            "params_dtype": "float32",
            "activation_storage": "fp8",
            "activation_storage_layers": "1",
        },
    },
    "embedding": {"untied embedding": {"untie_embeddings_and_output_weights": True}},
    "attention": {"fused attention": {"use_flash_attn": True}, "grouped queries": {"num_query_groups": 1}},
    "heads": {
        "normed heads": {"qk_layernorm": True, "rotary_percent": 0.5},
        "normed projections": {"qk_layernorm": True, "qk_layernorm_scope": "projection"},
        "gated heads": {"attention_output_gate": True, "rotary_percent": 0.0},
    },
    "norms": {"zero-centered norms": {"layernorm_zero_centered_gamma": True}},
    "biases": {"biases": {"add_bias_linear": True}},
    "loss": {"loss per token": {"calculate_per_token_loss": True}},
    "messages": {
        "messages not overlapped": {"overlap_p2p_comm": False},
        "outputs kept": {"deallocate_pipeline_outputs": False},
        "announced shapes": {"variable_seq_lengths": True},
    },
    "kernels": {"kernels": {"impl": "triton"}},
}
"""Settings of every feature, by dimension; a composition has at most one feature of each dimension."""
FEATURES = {name: (dimension, settings) for dimension, named in DIMENSIONS.items() for name, settings in named.items()}
REFUSED = {
    "context ranks, pipelined": (
        *("schedule", "parameters offloaded", "activations offloaded"),
        *("experts in groups", "Kimi Linear"),  # have a load-balancing loss
    ),
    "Kimi Linear": ("normed heads",),  # turn channels
    "FP8": ("context ranks, pipelined",),
}
"""Dimensions and features that are rejected together with a feature."""
QUICK = [name for name in FEATURES if name != "kernels"]
"""Features that do not run in the Triton interpreter."""
RARE = (
    *("kernels", "bf16", "FP8", "FP8 in blocks", "FP8, delayed"),
    *("saved in 8 bits", "a layer saved in 8 bits"),
)
"""Features that are drawn only as one of the two fixed ones: kernels are slow, and narrow types hide small errors."""


def are_accepted(first: str, second: str) -> bool:
    """Return True if two features of two dimensions are accepted together."""
    return REFUSED.keys().isdisjoint((first, second)) or all(
        {other, FEATURES[other][0]}.isdisjoint(REFUSED.get(one, ()))
        for one, other in ((first, second), (second, first))
    )


@st.composite
def compositions(draw: Callable, among: Sequence[str] = (*FEATURES,)) -> Composition:
    """Draw an accepted composition.

    Args:
        draw: the draw function of Hypothesis.
        among: allowed features.
    """
    allowed = {dimension: [name for name in named if name in among] for dimension, named in DIMENSIONS.items()}
    allowed = {dimension: named for dimension, named in allowed.items() if named}
    pair = draw(st.lists(st.sampled_from([*allowed]), min_size=2, max_size=2, unique=True))
    chosen = {dimension: draw(st.sampled_from(allowed[dimension])) for dimension in pair}
    for dimension, named in allowed.items():
        usual = [name for name in named if name not in RARE]
        if dimension not in chosen and usual and draw(st.integers(0, 2)) == 0:
            chosen[dimension] = draw(st.sampled_from(usual))
    size = draw(st.sampled_from([1, 2, 4]))
    try:
        return compose(chosen.values(), size)
    except ValueError:
        reject()


def compose(names: Iterable[str], micro_batch_size: int = 2) -> Composition:
    """Return the composition of some features.

    Raises:
        ValueError: if the configuration is rejected.
    """
    names = sorted(names, key=[*FEATURES].index)
    settings: dict[str, Any] = {}
    for name in names:
        settings |= FEATURES[name][1]
    replicas = settings.pop("replicas", 1)
    documents = settings.pop("documents", False)
    model = replace(BASE, **settings)
    train = TrainConfig(
        train_iters=8,
        global_batch_size=SEQUENCES,
        micro_batch_size=micro_batch_size,
        lr=3e-3,
        min_lr=3e-4,
        lr_warmup_iters=2,
    )
    check_trainable(model, train, replicas)
    return Composition(model, train, replicas, documents, tuple(names))


MUST_BE_ACCEPTED = [
    ("mHC", schedule, recompute, *offload, "dropout")
    for schedule in ("1f1b", "interleaved", "zb-h1")
    for recompute in ("recompute mhc", "recompute mhc + layernorm", "recompute whole layers, block")
    for offload in ((), ("parameters offloaded", "activations offloaded"))
] + [("KDA", "context ranks", "1f1b", "dropout"), ("replicas", "1f1b", "dropout")]
"""Features of the compositions that must be accepted; embeddings are tied."""
OF_FAMILIES = [
    (family, *features)
    for family in ("Qwen3-Next", "OLMo-hybrid", "mHC of DeepSeek-V4", "experts", "experts in groups", "Kimi Linear")
    for features in (
        ("1f1b", "context ranks"),
        ("recompute core_attn + mlp", "parameters offloaded", "activations offloaded"),
        ("documents", "replicas"),
        ("bf16", "recompute whole layers, block"),
    )
]
"""Features of the compositions that models of published families must have."""

WITH_FP8 = [
    ("FP8, delayed", "tensor-parallel ranks, tokens", "context ranks", "1f1b"),
    ("FP8, delayed", "replicas", "distributed optimizer", "zb-h1", "recompute core_attn + mlp", "parameters offloaded"),
    ("FP8", "tensor-parallel ranks, tokens", "context ranks", "zb-h1", "recompute core_attn + mlp"),
    ("saved in 8 bits", "zb-h1", "mHC", "recompute mhc + layernorm", "parameters offloaded", "activations offloaded"),
    ("a layer saved in 8 bits", "interleaved", "mHC", "recompute mhc + layernorm", "activations offloaded", "replicas"),
    ("saved in 8 bits", "FP8, delayed", "experts", "tensor-parallel ranks, tokens", "context ranks", "1f1b"),
    (
        "FP8, delayed",
        "experts in groups",
        "tensor-parallel ranks, tokens",
        "context ranks",
        "recompute core_attn + mlp",
    ),
]
"""Features of compositions that share scales, or histories of them, among ranks."""


def blocks_on_ranks() -> Composition:
    """Return a composition whose ranks have whole blocks of 8-bit floats of every array."""
    wide = {"hidden_size": 128, "kv_channels": 128, "ffn_hidden_size": 256, "seq_length": 128, "num_layers": 1}
    fp8 = {"params_dtype": "float32", "fp8": "hybrid", "fp8_recipe": "blockwise", "init_method_std": 0.02}
    ranks = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}
    return compose((), micro_batch_size=4)._replace(model=replace(BASE, **wide, **fp8, **ranks))


_EXECUTION = ("recompute", "offload", "pipeline", "context_parallel", "cp_", "p2p", "tensor_model", "sequence_parallel")
LIKE_ANY = {
    name: field.default
    for name, field in TransformerConfig.__dataclass_fields__.items()
    if any(word in name for word in _EXECUTION)
    or name
    in (
        "impl",
        "variable_seq_lengths",
        "calculate_per_token_loss",
        "microbatch_group_size_per_vp_stage",
        "use_distributed_optimizer",
    )
}
"""Default values of the settings that change how a step is executed, but not its result."""


def plain(composition: Composition) -> Composition:
    """Return the same model and data on one device, without recompute, offload and kernels."""
    model = replace(composition.model, **LIKE_ANY)
    train = composition.train
    if model.fp8 is None:  # whose scales are those of the arrays of a microbatch
        train = replace(train, micro_batch_size=SEQUENCES)
    return Composition(model, train, 1, composition.documents, ())


def corpus_of(composition: Composition) -> Corpus:
    """Return the corpus of a composition."""
    return corpus_of_documents() if composition.documents else tiny_corpus()


def step_of(trainer: Any, composition: Composition) -> Outcome:
    """Take one step with a trainer of either backend on this rank."""
    corpus = corpus_of(composition)
    length = composition.model.seq_length
    if composition.model.fp8_recipe == "delayed":
        trainer.set_parameters(with_history(trainer.parameters()))
    loss, gradients = trainer.loss_and_gradients(corpus.batch(STEP, SEQUENCES, length), STEP)
    result = trainer.train_step(STEP)
    assert abs(result.loss - loss) <= 1e-9 + LOSS[composition.model.product_dtype], "a step's loss is not the batch's"
    parameters = trainer.parameters()
    return Outcome(loss, gradients, parameters, trainer.loss_and_gradients(corpus.batch(NEXT, SEQUENCES, length))[0])


def with_history(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return parameters whose histories remember plausible exponents of inputs, weights and gradients."""
    history = np.zeros(amax_history.SHAPE, np.float32)
    for row, exponent, steps in ((0, 1, 2), (0, 4, 1), (1, -1, 1), (2, -9, 2), (2, -12, 1)):
        history[row, 0, 0, amax_history.BIAS + exponent] = steps
    return {name: history if is_history(value.shape) else value for name, value in parameters.items()}


def torch_step(composition: Composition, folder: Path | None = None) -> Outcome:
    """Take one step in PyTorch on this rank; every rank calls it.

    Args:
        composition: what to train.
        folder: for checkpoints, to resume from one and take a second step; None: do neither.
    """
    from reference_torch.groups import make_mesh
    from reference_torch.train import Trainer

    mesh = make_mesh(composition.model) if composition.ranks > 1 else None
    made = composition.model, composition.train, corpus_of(composition)
    trainer = Trainer(*made, device="cpu", mesh=mesh)
    outcome = step_of(trainer, composition)
    if folder is not None:
        trainer.save(folder)
        second = Trainer(*made, device="cpu", mesh=mesh)
        second.train_step(second.resume(folder))
        arrays = read_checkpoint(second.save(folder)).arrays
        outcome = outcome._replace(resumed=arrays)
        _end(trainer, second)
    else:
        _end(trainer)
    return outcome


def _end(*trainers: Any) -> None:
    """Close offload managers, and destroy the process groups of the mesh."""
    for trainer in trainers:
        trainer.offload.close()
    end_groups()


class Pools:
    """Pools of processes that compositions reuse, by number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def step(self, composition: Composition, timeout: float = 120.0):
        """Take one step in PyTorch on the ranks of the composition."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if composition.ranks == 1:
                return torch_step(composition, folder)
            count = composition.ranks
            pool = self._pools.setdefault(count, RankPool(count, 300.0))
            return pool.run("tests.composition:torch_step", composition, folder, timeout=timeout)[0]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def jax_step(composition: Composition) -> Outcome:
    """Take one step in JAX on the devices of the composition."""
    import jax

    from jax_impl.groups import make_mesh
    from jax_impl.train import Trainer

    mesh = make_mesh(composition.model, jax.devices()[: composition.ranks])
    return step_of(Trainer(composition.model, composition.train, corpus_of(composition), mesh), composition)


@lru_cache(maxsize=256)
def _plain_step(composition: Composition) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        return torch_step(composition, Path(name))


def _disturbed_gradients(composition: Composition, seed: int) -> dict[str, np.ndarray]:
    """Return the gradients of PyTorch's model after a random change of each weight by at most an ulp of bfloat16."""
    from reference_torch.train import Trainer

    corpus = corpus_of(composition)
    trainer = Trainer(composition.model, composition.train, corpus, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1 + 2**-8 * (2 * torch.rand(parameter.shape, generator=generator) - 1))
    return trainer.loss_and_gradients(corpus.batch(STEP, SEQUENCES, composition.model.seq_length), STEP)[1]


@lru_cache(maxsize=256)
def effect_of_rounding(composition: Composition) -> float:
    """Return how far roundings to bfloat16 move the gradients of a plain model.

    The largest of five distances from the gradients in float32: those in bfloat16, and those in float32 of four models
    whose weights differ by at most one ulp of bfloat16. One alone can be small by chance: for one model of three
    layers with the delta rule, hyper-connections and dropout, the five are 0.027 to 0.15.
    """
    wide = plain(composition._replace(model=replace(composition.model, bf16=False)))
    exact = _plain_step(wide).gradients
    moved = [_plain_step(plain(composition)).gradients, *(_disturbed_gradients(wide, seed) for seed in range(4))]
    return max(difference for each in moved for _, difference in _distances(each, exact, exact=False))


def _distances(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], exact: bool
) -> Iterator[tuple[str, float]]:
    """Yield the relative difference of every gradient."""
    total = np.sqrt(sum(np.vdot(g, g) for g in expected.values()))
    for name, gradient in expected.items():
        difference = relative_difference(found[name], gradient)
        if not exact:  # a gradient whose terms nearly cancel is measured against a share of the total norm
            difference *= min(1.0, np.linalg.norm(gradient) / (0.1 * total))
        yield name, float(difference)


def assert_learns_as_plain(found: Outcome, composition: Composition, same_rounding: bool = True) -> None:
    """Compare one step with the step of the plain model.

    Args:
        found: results of the step.
        composition: the composition of the step.
        same_rounding: whether bfloat16 rounds at the same operations as in the plain model. This is true in PyTorch,
            but for tensor-parallel ranks, which round their parts of sums. Elsewhere the tolerance is at least twice
            `effect_of_rounding`.
    """
    expected = _plain_step(plain(composition))
    dtype = composition.model.product_dtype
    adds_in_parts = composition.model.tensor_model_parallel_size * composition.model.context_parallel_size > 1
    if dtype == "float8" and same_rounding and not adds_in_parts:
        dtype = composition.model.compute_dtype
    exact = dtype == "float64"
    limit = 1e-10 if exact else GRADIENT[dtype]
    if dtype == "float8":  # of one rounding that falls otherwise; an unquantised product is 5e-2 away
        limit = 2e-1 if _rounds_parts(composition.model) else 1e-2
    same_rounding = same_rounding and composition.model.tensor_model_parallel_size == 1
    if dtype == "bfloat16" and not same_rounding:
        limit = max(limit, 2 * effect_of_rounding(composition))
    tolerance = 1e-11 if exact else LOSS[dtype]
    assert abs(found.loss - expected.loss) <= tolerance, f"loss {found.loss}, plain {expected.loss}"
    assert found.gradients.keys() == expected.gradients.keys()
    for name, difference in _distances(found.gradients, expected.gradients, exact):
        assert difference <= limit, f"gradient of {name}: {difference:.1e} from the plain one"
    for name, value in expected.parameters.items():
        if is_history(value.shape):
            # ranks also remember the exponents of smaller parts
            ours, plain_ones = (np.maximum.accumulate(x[..., ::-1], axis=-1) for x in (found.parameters[name], value))
            if not _rounds_parts(composition.model):
                np.testing.assert_array_equal(ours, plain_ones, name)
            for one, other in ((ours, plain_ones), (plain_ones, ours)):  # a rounded gradient may have the next exponent
                assert (one[..., 1:] >= other[..., :-1]).all(), name
            assert (value != next(iter(with_history({name: value}).values()))).any(), f"{name} has not advanced"
    for name, parameter in expected.parameters.items() if exact else ():
        difference = relative_difference(found.parameters[name], parameter)
        assert difference <= 1e-8, f"{name} after the step: {difference:.1e}"  # AdamW divides by roots of small squares
    if exact and found.resumed is not None and expected.resumed is not None:
        for name, array in expected.resumed.items():
            difference = relative_difference(found.resumed[name], array)
            assert difference <= 1e-8, f"{name} after a resumed step: {difference:.1e}"
    limit = 1e-8 if exact else LOSS[dtype]
    assert abs(found.next_loss - expected.next_loss) <= limit, f"loss after the step {found.next_loss}"


def _rounds_parts(model: TransformerConfig) -> bool:
    """Return True if ranks round parts of what one device rounds: gradients of the same heads or latents, or blocks."""
    if model.fp8_recipe == "blockwise" and model.tensor_model_parallel_size * model.context_parallel_size > 1:
        return model.hidden_size % BLOCK != 0
    attention = "attention" in model.mixers and model.query_groups < model.tensor_model_parallel_size
    latent = bool(model.mixers & {"kda", "mla"}) and model.tensor_model_parallel_size > 1
    states = bool(model.mixers & {"gdn", "kda"}) and model.linear_heads[0] < model.tensor_model_parallel_size
    return attention or latent or states


def pairs_of(composition: Composition) -> set[tuple[str, str]]:
    """Return all pairs of features, in the order of FEATURES."""
    return set(combinations(composition.features, 2))
