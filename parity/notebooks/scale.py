"""Tensor parallelism, divided moments and FP8 in both backends, for notebook 11."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import torch

from diptych.planner.memory.ranks import parameter_bytes, shard_bytes
from diptych.plans import fp8
from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig
from diptych.plans.model.data import load_corpus
from jax_impl.fp8 import fp8_linear as jax_linear
from jax_impl.groups import make_mesh
from jax_impl.train import Trainer as JaxTrainer
from parity.compare import relative_difference
from parity.ranks import torch_trainer
from reference_torch.fp8 import fp8_linear as torch_linear

MODEL = TransformerConfig(
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    ffn_hidden_size=64,
    seq_length=16,
    layer_pattern="kda,attention",
    enable_hyper_connections=True,
    params_dtype="float64",
)
TRAIN = TrainConfig(train_iters=1, global_batch_size=2)
LARGE = TransformerConfig(
    hidden_size=4096, num_layers=32, num_attention_heads=32, ffn_hidden_size=14336, vocab_size=128256, seq_length=8192
)


def standing_gigabytes(sizes: Sequence[int]) -> dict[str, list[float]]:
    """Return the GiB of parameters, gradients and moments of a rank of a large model, by mesh and number of ranks.

    Args:
        sizes: numbers of ranks.
    """

    def gigabytes(tensor: int, replicas: int) -> float:
        config = replace(LARGE, tensor_model_parallel_size=tensor)
        return (2 * parameter_bytes(config, 0) + 2 * shard_bytes(config, 0, replicas)) / 2**30

    return {
        "replicas": [gigabytes(1, 1) for _ in sizes],
        "replicas, divided moments": [gigabytes(1, size) for size in sizes],
        "tensor parallelism": [gigabytes(size, 1) for size in sizes],
    }


def errors_of_ranks(sizes: Sequence[int]) -> dict[str, list[float]]:
    """Return the worst error of a gradient in float64 on tensor-parallel ranks beside one process, by curve.

    Args:
        sizes: numbers of ranks; 1, 2 or 4.
    """
    errors: dict[str, list[float]] = {}
    corpus = load_corpus(DataConfig())
    batch = corpus.batch(0, TRAIN.global_batch_size, MODEL.seq_length)
    with torch_trainer(MODEL, TRAIN, corpus) as trainer:
        expected = trainer.loss_and_gradients(batch)[1]
    for size in sizes:
        for tokens in (False, True):
            config = replace(MODEL, tensor_model_parallel_size=size, sequence_parallel=tokens and size > 1)
            mesh = make_mesh(config, jax.devices()[:size]) if size > 1 else None
            with torch_trainer(config, TRAIN, corpus) as trainer:
                found = {"PyTorch": trainer.loss_and_gradients(batch)[1]}
            found["JAX"] = JaxTrainer(config, TRAIN, corpus, mesh).loss_and_gradients(batch)[1]
            for backend, gradients in found.items():
                curve = errors.setdefault(f"{backend}{', divided tokens' * tokens}", [])
                curve.append(max(float(relative_difference(gradients[name], expected[name])) for name in expected))
    return errors


def outlier_errors(outliers: Sequence[float], width: int = 512) -> dict[str, list[float]]:
    """Return the error of a matrix product in FP8 whose input has one large entry, by curve.

    Args:
        outliers: sizes of the entry; the others are normally distributed.
        width: rows and columns of all matrices.
    """
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(2, width, width)).astype(np.float32)
    errors: dict[str, list[float]] = {}
    for outlier in outliers:
        given = x.copy()
        given[0, 0] = outlier
        exact = given.astype(np.float64) @ weight.T.astype(np.float64)
        for recipe in ("current", "blockwise"):
            how = fp8.product_recipe("e4m3", recipe)
            found = {
                "PyTorch": torch_linear(torch.from_numpy(given), torch.from_numpy(weight), how).numpy(),
                "JAX": np.asarray(jax_linear(jax.numpy.asarray(given), jax.numpy.asarray(weight), how)),
            }
            for backend, y in found.items():
                rows = slice(1, None)  # of tokens without the outlier
                error = float(relative_difference(y[rows], exact[rows]))
                errors.setdefault(f"{backend}, {recipe}", []).append(error)
    return errors


def error_of_parts(outlier: float, width: int = 512) -> float:
    """Return the error of a matrix product if two ranks scale a half of the columns each, relative to one scale."""
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(2, width, width)).astype(np.float32)
    x[0, 0] = outlier
    how = fp8.product_recipe("e4m3", "current")
    unsharded = fp8.matrix_product(x, weight, how.inputs, how.weights)
    halves = slice(0, width // 2), slice(width // 2, None)
    first, second = (fp8.matrix_product(x[:, half], weight[:, half], how.inputs, how.weights) for half in halves)
    return float(relative_difference(first + second, unsharded))
