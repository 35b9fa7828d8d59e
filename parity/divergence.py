"""Measurement of the drift between the backends: by layer, by operation, by training step.

Two programs that round at different operations drift apart. To test whether rounding is the only cause, both backends
receive equal inputs, and each result is compared with the other and with a float64 reference.

Parameters are passed in float32 and widened if the model computes in float64, so all dtypes start from equal values.
float64 requires jax_enable_x64.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

import jax_impl.saving
import jax_impl.train
import jax_impl.transformer
import reference_torch.saving
import reference_torch.train
import reference_torch.transformer
from diptych.plans.checkpoint import (
    FIRST_MOMENT,
    MODEL,
    SECOND_MOMENT,
    Checkpoint,
    read_checkpoint,
    run_settings,
    write_checkpoint,
)
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.config.precision import in_dtype
from diptych.plans.model.data import Batch, Corpus
from diptych.plans.model.parameters import initial_value, parameter_specs
from diptych.plans.training import learning_rate
from parity.compare import relative_difference
from parity.implementations import Implementation, JaxImplementation, TorchImplementation, Values, make_inputs
from parity.pytrees import BFLOAT16, to_numpy
from parity.rounding import EPSILON

Parameters = Mapping[str, np.ndarray]
"""Arrays by canonical parameter name."""
Trainer = reference_torch.train.Trainer | jax_impl.train.Trainer
OperationPair = tuple[Callable[..., Any], Callable[..., Any]]
"""One operation in PyTorch and in JAX."""


def computing_in(config: TransformerConfig, dtype: str) -> TransformerConfig:
    """Return the configuration of the same model with another compute dtype, one of EPSILON's.

    Raises:
        ValueError: the dtype is unknown.
    """
    if dtype not in EPSILON:
        raise ValueError(f"dtype: expected one of {', '.join(EPSILON)}, got {dtype!r}")
    return in_dtype(config, dtype)


def initial_parameters(config: TransformerConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the model's initial parameters for a seed, in float32."""
    specs = parameter_specs(config)
    return {name: initial_value(seed, name, spec).astype(np.float32) for name, spec in specs.items()}


def one_ulp(parameters: Parameters, config: TransformerConfig, name: str) -> dict[str, np.ndarray]:
    """Return the parameters with the first entry of one moved by one ulp of the dtype that the model computes in.

    In mixed precision that is an ulp of bfloat16, since a smaller change of a float32 weight is lost in rounding.

    Raises:
        ValueError: there is no such parameter.
    """
    if name not in parameters:
        raise ValueError(f"name: expected one of the {len(parameters)} parameters, got {name!r}")
    values = {key: value.astype(config.params_dtype) for key, value in parameters.items()}
    entry = values[name].reshape(-1)
    narrow = entry[:1].astype(BFLOAT16 if config.bf16 else config.params_dtype)
    entry[:1] = np.nextafter(narrow, np.array(np.inf, narrow.dtype))
    return values


def layer_values(
    backend: str,
    config: TransformerConfig,
    parameters: Parameters,
    tokens: np.ndarray,
    compiler_options: dict[str, Any] | None = None,
) -> list[np.ndarray]:
    """Return the activations of a model without dropout: after the embedding, after every layer, and the logits.

    Args:
        backend: torch or jax.
        config: the single-device model.
        parameters: parameter values.
        tokens: token ids. [B, T]
        compiler_options: options of XLA, for JAX.

    Returns:
        num_layers + 2 numpy arrays, in the dtypes in which the model computes them.
    """
    if backend == "torch":
        model = reference_torch.transformer.GPTModel(config)
        reference_torch.saving.import_parameters(model, parameters)
        with torch.no_grad():
            return [to_numpy(x) for x in _layer_values("torch", model, torch.from_numpy(tokens))]
    graph, params = nnx.split(jax_impl.transformer.GPTModel(config), nnx.Param)

    @partial(jax.jit, compiler_options=compiler_options)
    def run(params: nnx.State) -> list[jax.Array]:
        return _layer_values("jax", nnx.merge(graph, params), jnp.asarray(tokens))

    return [np.asarray(x) for x in run(jax_impl.saving.import_parameters(params, parameters))]


def _layer_values(backend: str, model: Any, tokens: Any) -> list[Any]:
    """Return the activations of either backend's model; modules and functions of both have equal names."""
    ops = _module(backend, "ops")
    connection = _module(backend, "hyper_connections").HyperConnectionModule
    config = model.config
    hidden_states = model.embedding(tokens)
    if config.bf16:
        hidden_states = hidden_states.bfloat16() if backend == "torch" else hidden_states.astype(jnp.bfloat16)
    if config.enable_hyper_connections:
        hidden_states = connection.input_expand(hidden_states, config.num_residual_streams)
    positions = (torch if backend == "torch" else jnp).arange(tokens.shape[1])
    context = _module(backend, "forward_context").ForwardContext(positions)
    values = [hidden_states]
    for number in range(config.num_layers):
        values.append(model.decoder.layers[str(number)](values[-1], context))
    hidden_states = values[-1]
    if config.enable_hyper_connections:
        hidden_states = connection.output_contract(hidden_states, config.num_residual_streams)
    head = (model.output_layer or model.embedding).weight[...]
    return [*values, ops.at_least_float32(ops.linear(model.decoder.final_layernorm(hidden_states), head))]


class Trajectory(NamedTuple):
    """The parameters and losses of a training run."""

    parameters: np.ndarray
    """All parameters after every step, concatenated in the order of their names. [steps, P] float64"""
    losses: np.ndarray
    """Loss before every step, nats per token. [steps]"""


def trajectory(trainer: Trainer, parameters: Parameters, corpus: Corpus, steps: int) -> Trajectory:
    """Train from the first step and record the trajectory; a reused trainer compiles only once.

    Args:
        trainer: trainer of either backend, on one process.
        parameters: initial parameters; the optimizer's moments start at 0.
        corpus: training data, instead of the trainer's own.
        steps: number of steps, at most train_iters.
    """
    values = {name: value.astype(trainer.config.params_dtype) for name, value in parameters.items()}
    zeros = {name: np.zeros_like(value) for name, value in values.items()}
    parts = {MODEL: values, FIRST_MOMENT: zeros, SECOND_MOMENT: zeros}
    arrays = {prefix + name: value for prefix, part in parts.items() for name, value in part.items()}
    trainer.corpus = corpus
    settings = run_settings(trainer.config, trainer.train_config, corpus)
    with TemporaryDirectory() as folder:
        trainer.resume(write_checkpoint(Path(folder), Checkpoint(0, arrays, settings)))
    seen = []
    losses = []
    for step in range(steps):
        losses.append(trainer.train_step(step).loss)
        seen.append(flat(trainer.parameters()))
    return Trajectory(np.array(seen), np.array(losses))


def drift(ours: Trajectory, theirs: Trajectory) -> np.ndarray:
    """Return the norm-wise relative difference of all parameters together after every step, [steps]."""
    return np.array([relative_difference(a, b) for a, b in zip(ours.parameters, theirs.parameters, strict=True)])


def state_of(trainer: Trainer) -> dict[str, dict[str, np.ndarray]]:
    """Return copies of parameters and AdamW's moments, as ``{"model.": {name: array}, "first_moment.": ...}``."""
    with TemporaryDirectory() as folder:
        arrays = read_checkpoint(trainer.save(Path(folder))).arrays
    prefixes = (MODEL, FIRST_MOMENT, SECOND_MOMENT)
    return {p: {name.removeprefix(p): a for name, a in arrays.items() if name.startswith(p)} for p in prefixes}


def flat(arrays: Parameters) -> np.ndarray:
    """Return the elements of all arrays, concatenated in the order of the names, in float64."""
    return np.concatenate([arrays[name].ravel().astype(np.float64) for name in sorted(arrays)])


class OperationError(NamedTuple):
    """The differences of two backends' results of one operation, given equal inputs.

    Differences are norm-wise relative over all results, in ulps of the dtype (EPSILON).
    """

    name: str
    between: float
    torch: float
    """Difference of PyTorch from float64."""
    jax: float
    """Difference of JAX from float64."""
    unequal: float
    """Share of entries whose values differ between the backends."""


def operation_pair(name: str, **settings: Any) -> OperationPair:
    """Return one operation of both backends, e.g. ``operation_pair("ops.rms_norm", epsilon=1e-5)``."""
    module, function = name.split(".")
    ours, theirs = (partial(getattr(_module(backend, module), function), **settings) for backend in ("torch", "jax"))
    return ours, theirs


def compare_operation(
    name: str, functions: OperationPair, *inputs: np.ndarray | None, dtype: str | None = None
) -> tuple[OperationError, list[np.ndarray]]:
    """Run an operation of both backends on equal inputs, and PyTorch's in float64 too.

    Args:
        name: name for the result.
        functions: the operation in PyTorch and in JAX, where it is compiled; each returns an array or a tuple.
        *inputs: arrays given to both; None is passed through.
        dtype: dtype whose ulps are the unit; None: that of the first result.

    Returns:
        The error, and PyTorch's results.
    """
    ours, exact = (run_torch(functions[0], *inputs, dtype=run_dtype) for run_dtype in (None, "float64"))
    theirs = _run(JaxImplementation, functions[1], inputs, None)
    a, b, truth = (np.concatenate([x.ravel().astype(np.float64) for x in xs]) for xs in (ours, theirs, exact))
    unit = EPSILON[dtype or str(ours[0].dtype)]
    between, of_torch, of_jax = (relative_difference(*pair) / unit for pair in ((a, b), (a, truth), (b, truth)))
    return OperationError(name, between, of_torch, of_jax, float(np.mean(a != b))), ours


def operation_errors(trainer: reference_torch.train.Trainer, batch: Batch) -> list[OperationError]:
    """Return the errors of the operations of a training step, each given PyTorch's results of the earlier ones.

    The operations are those of the last layer, the head, the loss and AdamW's update of a trainer's model, in the dtype
    in which it computes. The MLP reads the mean of the streams, since its hyper-connection equals that of attention.

    Args:
        trainer: trainer of PyTorch; its model has hyper-connections, attention in the last layer, and no biases.
        batch: batch of the step.

    Raises:
        ValueError: the model has no hyper-connections.
    """
    config = trainer.config
    values = trainer.parameters()
    if not config.enable_hyper_connections:
        raise ValueError("trainer: expected a model with hyper-connections, got none; set enable_hyper_connections")
    errors: list[OperationError] = []

    def run(name: str, functions: OperationPair, *inputs: np.ndarray | None) -> Any:
        error, results = compare_operation(name, functions, *inputs, dtype=config.compute_dtype)
        errors.append(error)
        return results if len(results) > 1 else results[0]

    layer = f"decoder.layers.{config.num_layers - 1}"
    streams = layer_values("torch", config, values, batch.tokens)[config.num_layers - 1]
    written = _mixer(run, config, values, layer, streams)
    mean = run_torch(lambda x: x.mean(-2), written)[0]
    product = operation_pair("ops.linear")
    norm = operation_pair("ops.rms_norm", epsilon=config.layernorm_epsilon)
    normed = run_torch(norm[0], mean, values[f"{layer}.pre_mlp_layernorm.weight"])[0]
    inner = run("product, MLP in", product, normed, values[f"{layer}.mlp.linear_fc1.weight"])
    activated = run("activation", operation_pair(f"ops.{config.layer(config.num_layers - 1).activation}"), inner)
    run("product, MLP out", product, activated, values[f"{layer}.mlp.linear_fc2.weight"])
    normed = run_torch(norm[0], mean, values["decoder.final_layernorm.weight"])[0]
    head = "output_layer" if config.untie_embeddings_and_output_weights else "embedding"
    logits = run("product, head", product, normed, values[f"{head}.weight"])
    run("loss", operation_pair("ops.cross_entropy"), logits, batch.targets)
    weight = f"{layer}.mlp.linear_fc1.weight"
    parameter, first, second = (arrays[weight] for arrays in state_of(trainer).values())
    gradient = trainer.loss_and_gradients(batch, trainer.steps_taken)[1][weight]
    state = gradient, parameter, first, second
    run("AdamW", adamw(trainer.train_config, trainer.steps_taken), *state)
    return errors


def _mixer(
    run: Callable[..., Any], config: TransformerConfig, values: Parameters, layer: str, streams: np.ndarray
) -> np.ndarray:
    """Run attention and its hyper-connection, operation by operation, and return the streams it writes."""
    coefficients = [values[f"{layer}.self_attention_hyper_connection.{name}"] for name in ("phi", "alpha", "bias")]
    h_pre, h_post, h_res = run(
        "mHC mappings", operation_pair("hyper_connections.compute_mappings"), streams, *coefficients
    )
    run("Sinkhorn", operation_pair("hyper_connections.sinkhorn"), _sinkhorn_logits(config, streams, *coefficients))
    aggregated = run("aggregate", operation_pair("hyper_connections.aggregate"), streams, h_pre)
    norm = operation_pair("ops.rms_norm", epsilon=config.layernorm_epsilon)
    normed = run("norm", norm, aggregated, values[f"{layer}.input_layernorm.weight"])
    qkv = run(
        "product, q k v", operation_pair("ops.linear"), normed, values[f"{layer}.self_attention.linear_qkv.weight"]
    )
    qkv = qkv.reshape(*qkv.shape[:2], -1, config.head_dim)
    heads = config.num_attention_heads
    groups = config.query_groups
    q, k, v = np.split(qkv, (heads, heads + groups), axis=2)
    rotary = operation_pair("ops.rotary_embedding", base=config.rotary_base)
    positions = np.arange(q.shape[1])
    q = run("rotary", rotary, q, positions)
    k = run_torch(rotary[0], k, positions)[0]
    attended = run("attention", operation_pair("ops.causal_attention"), q, k, v)
    attended = attended.reshape(*attended.shape[:2], -1)
    projection = values[f"{layer}.self_attention.linear_proj.weight"]
    output = run("product, attention out", operation_pair("ops.linear"), attended, projection)
    return run("mHC write", operation_pair("hyper_connections.write_streams"), streams, h_res, output, None, h_post)


def _sinkhorn_logits(
    config: TransformerConfig, streams: np.ndarray, phi: np.ndarray, alpha: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """Return the logits of Sinkhorn (mHC, eqs. 5-6), computed in float64 and rounded to phi's dtype, [B, T, S, S]."""
    size = config.num_residual_streams
    x = streams.astype(np.float64).reshape(*streams.shape[:2], -1)
    inverse_rms = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + config.layernorm_epsilon)
    logits = (x @ phi * inverse_rms * alpha[2] + bias)[..., 2 * size :]
    return logits.reshape(*streams.shape[:2], size, size).astype(phi.dtype)


def adamw(train: TrainConfig, step: int) -> OperationPair:
    """Return AdamW's update of one matrix at a step in both backends, with the settings of their trainers.

    Both take gradient, parameter, first and second moment, and return the new parameter.
    """
    rate = learning_rate(train, step)
    betas = (train.adam_beta1, train.adam_beta2)

    def in_torch(gradient: torch.Tensor, parameter: torch.Tensor, *moments: torch.Tensor) -> torch.Tensor:
        parameter = parameter.clone()
        first, second = (moment.clone() for moment in moments)
        optimizer = torch.optim.AdamW([parameter], rate, betas, train.adam_eps, train.weight_decay, fused=True)
        optimizer.state[parameter] = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}
        parameter.grad = gradient
        optimizer.step()
        return parameter

    def in_jax(gradient: jax.Array, parameter: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        adam = optax.scale_by_adam(*betas, train.adam_eps)
        decay = optax.add_decayed_weights(train.weight_decay)
        optimizer = optax.chain(adam, decay)
        state = optax.tree_utils.tree_set(optimizer.init(parameter), count=jnp.int32(step), mu=first, nu=second)
        update = jnp.asarray(optimizer.update(gradient, state, parameter)[0])
        return parameter - jnp.asarray(rate, parameter.dtype) * update

    return in_torch, in_jax


def run_torch(function: Callable[..., Any], *inputs: np.ndarray | None, dtype: str | None = None) -> list[np.ndarray]:
    """Return the results of a function of tensors, without gradients.

    Args:
        function: returns a tensor or a tuple.
        *inputs: arrays; None is passed through.
        dtype: dtype of floating inputs; None: their own.
    """
    return _run(TorchImplementation, function, inputs, dtype)


def _run(
    kind: Callable[..., Implementation], function: Callable, inputs: Sequence[np.ndarray | None], dtype: str | None
) -> list[np.ndarray]:
    call = make_inputs(inputs)
    return [*kind(function, call).run(Values(call.arrays, {}), dtype, None).outputs.values()]


def _module(backend: str, name: str) -> Any:
    return importlib.import_module(f"{'reference_torch' if backend == 'torch' else 'jax_impl'}.{name}")
