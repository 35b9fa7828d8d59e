"""The operations that layers consist of, as pure functions on arrays.

Mirrors ``reference_torch/ops.py``: same names, same order, same signatures. No function here owns parameters or state.
Randomness is an argument: a counter (:class:`DropoutState`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.core import Tracer
from jaxtyping import Float, Int, Integer, UInt32

from diptych.plans.config import TransformerConfig
from diptych.plans.model import operations
from diptych.plans.model.implementation import require_packages, uses_kernels
from diptych.plans.model.parameters import ParameterSpec, initial_value, rotary_frequencies
from diptych.plans.model.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, dropout_threshold
from jax_impl.attention import causal_attention as causal_attention
from jax_impl.attention import fused_attention as fused_attention
from jax_impl.attention import masked_attention as masked_attention
from jax_impl.linear_products import LinearProducts, multiply
from jax_impl.operands import at_least_float32, given_operand, operand


def parameter(config: TransformerConfig, name: str, spec: ParameterSpec) -> nnx.Param:
    """Return a parameter with its initial value from diptych/plans/model/parameters.py.

    Args:
        config: determines seed and type.
        name: canonical name, e.g. ``decoder.layers.0.mlp.linear_fc1.weight``.
        spec: shape and distribution.

    Raises:
        ValueError: float64 parameters while JAX has 64-bit types turned off.
    """
    if jax.dtypes.canonicalize_dtype(config.params_dtype) != config.params_dtype:
        raise ValueError(
            "params_dtype: expected JAX with 64-bit types for 'float64', got jax_enable_x64=False; call "
            "jax.config.update('jax_enable_x64', True) first, or set JAX_ENABLE_X64=1"
        )
    return nnx.Param(jnp.asarray(initial_value(config.seed, name, spec), config.params_dtype))


def _multiply_high_low(a: Array, b: int) -> tuple[Array, Array]:
    """Return the upper and the lower word of the 64-bit product a * b, computed from 16-bit halves."""
    b_low = np.uint32(b & 0xFFFF)
    b_high = np.uint32(b >> 16)
    a_low = a & 0xFFFF
    a_high = a >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    carry = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (carry >> 16), a * np.uint32(b)


def philox_4x32(key: tuple, counter: tuple) -> tuple[Array, Array, Array, Array]:
    """Return four random words per counter, bitwise equal to diptych.plans.model.philox.

    Args:
        key: two words < 2**32, each a number or an integer scalar.
        counter: four words, each a number < 2**32 or an integer array, broadcast together; only the lower 32 bits of
            an array are used.

    Returns:
        Four arrays of words, uint32.

    Raises:
        ValueError: a number is no 32-bit word.

    Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    for index, word in enumerate((*key, *counter)):
        if not isinstance(word, Array | np.ndarray):
            operations.check_word(f"key[{index}]" if index < 2 else f"counter[{index - 2}]", word)
    words = [jnp.asarray(word).astype(jnp.uint32) for word in (*counter, *key)]
    return _philox_rounds(*words, rounds=ROUNDS)


@partial(jax.jit, static_argnames="rounds")  # traced once per shape: masks are most of a model's operations
def _philox_rounds(
    c0: Array, c1: Array, c2: Array, c3: Array, k0: Array, k1: Array, *, rounds: int
) -> tuple[Array, Array, Array, Array]:
    """Run the rounds of Philox on words of 32 bits."""
    for _ in range(rounds):
        high0, low0 = _multiply_high_low(c0, MULTIPLIERS[0])
        high2, low2 = _multiply_high_low(c2, MULTIPLIERS[1])
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + np.uint32(KEY_STEPS[0])
        k1 = k1 + np.uint32(KEY_STEPS[1])
    return c0, c1, c2, c3


class DropoutState(NamedTuple):
    """The counter of a dropout mask: with the site, it determines the mask."""

    seed: int
    step: int | Integer[Array, ""]
    row_low: UInt32[Array, "b t"]
    row_high: UInt32[Array, "b t"]


def dropout_state(
    seed: int,
    step: int | Integer[Array, ""],
    samples: Int[Array, "*b"],
    positions: Int[Array, " t"],
    seq_length: int,
) -> DropoutState:
    """Return a dropout state with rows (sample * seq_length + position) modulo 2**64, as two 32-bit words.

    Args:
        seed: < 2**32.
        step: training step, < 2**32.
        samples: index in the global batch of each sequence or of each token's sequence. [B] or [B, T] integer
        positions: positions of the tokens within their sequence. [T] integer
        seq_length: sequence length of the model, so that sequences do not share rows.

    Raises:
        ValueError: an argument has a wrong shape, type or value.
    """
    operations.check_rows(operand("samples", samples), operand("positions", positions), seq_length)
    for name, word in (("seed", seed), ("step", step)):
        _check_word(name, word)
    low, high = _words(samples)
    position_low, position_high = _words(positions)
    low, high = (part if part.ndim == 2 else part[:, None] for part in (low, high))
    carried, low = _multiply_high_low(low, seq_length)
    row_low = low + position_low
    return DropoutState(seed, step, row_low, carried + high * np.uint32(seq_length) + position_high + (row_low < low))


def _words(x: Array) -> tuple[Array, Array]:
    """Return the lower and the upper word of integers extended to 64 bits."""
    if x.dtype.itemsize == 8:
        return x.astype(jnp.uint32), (x >> 32).astype(jnp.uint32)
    high = -(x < 0).astype(jnp.int32) if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.zeros_like(x)
    return x.astype(jnp.uint32), high.astype(jnp.uint32)


def _check_word(name: str, word: Any) -> None:
    """Check a word; of an array, which may be traced, check only type and shape."""
    if not isinstance(word, Array):
        operations.check_word(name, word)
        return
    operations.check_integers(**{name: operand(name, word)})
    operations.check_shape(name, word.shape, ())


def check_state(shape: tuple[int, ...], state: Any, site: Any) -> None:
    """Raise an error if a dropout state does not fit the rows of an array.

    Args:
        shape: [B, T], the leading axes of the array.
        state: from dropout_state.
        site: see diptych.plans.model.philox.

    Raises:
        ValueError: an argument has a wrong shape, type or value.
    """
    rows = {name: operand(f"state.{name}", getattr(state, name)) for name in ("row_low", "row_high")}
    operations.check_dropout_rows(shape, **rows)
    for name, word in (("state.seed", state.seed), ("state.step", state.step), ("site", site)):
        _check_word(name, word)


def dropout(x: Float[Array, "b t *rest"], rate: float, state: DropoutState, site: int | Integer[Array, ""]) -> Array:
    """Zero elements with probability ``rate`` and scale the others by 1 / (1 - rate).

    The mask depends only on (seed, site, step, row, column). So PyTorch, the Triton kernels and every layout of the
    batch give the same mask.

    Args:
        x: any floating array; the axes after the second are flattened to columns. [B, T, ...]
        rate: in [0, 1).
        state: rows of the batch.
        site: number of the dropout in the model, see diptych.plans.model.philox.

    Raises:
        ValueError: an argument has a wrong shape, type or value.
    """
    operations.check_dropout(operand("x", x), rate)
    check_state(tuple(x.shape[:2]), state, site)
    if rate == 0.0 or not x.size:
        return x

    def masked(x: Array, step: int | Array, row_low: Array, row_high: Array) -> Array:
        width = int(np.prod(x.shape[2:]))
        counter = (jnp.arange((width + 3) // 4), row_low[..., None], row_high[..., None], step)
        words = jnp.stack(philox_4x32((state.seed, site), counter), axis=-1)
        keep = words.reshape(*words.shape[:2], -1)[..., :width] >= np.uint32(dropout_threshold(rate))
        return jnp.where(keep.reshape(x.shape), x * (1.0 / (1.0 - rate)), 0.0)

    step = jnp.asarray(state.step, None if isinstance(state.step, Array) else jnp.uint32)
    return jax.checkpoint(masked)(x, step, state.row_low, state.row_high)  # backward recomputes the mask


def add_bias(x: Float[Array, "*b o"], bias: Float[Array, " o"] | None) -> Float[Array, "*b o"]:
    """Return ``x + bias`` in the type of x, or x itself if bias is None.

    Args:
        x: input. [..., O]
        bias: bias; None: 0. [O]

    Raises:
        ValueError: an argument has a wrong shape or type.
    """
    operations.check_bias(operand("x", x), given_operand("bias", bias))
    return x if bias is None else x + bias.astype(x.dtype)


def linear(
    x: Float[Array, "*b i"], weight: Float[Array, "o i"], bias: Float[Array, " o"] | None = None
) -> Float[Array, "*b o"]:
    """Return ``x @ weight.T + bias``, in the type of x.

    Args:
        x: input. [..., I]
        weight: weight. [O, I]
        bias: bias; None: 0. [O]

    Returns:
        [..., O]

    Raises:
        ValueError: an argument has a wrong shape or type.
    """
    operations.check_linear(operand("x", x), operand("weight", weight), given_operand("bias", bias))
    return add_bias(multiply(LinearProducts(), x, weight), bias)


def grouped_linear(
    x: Float[Array, "m i"], weight: Float[Array, "e o i"], sizes: Int[Array, " e"]
) -> Float[Array, "m o"]:
    """Multiply consecutive rows by the matrix of their group.

    Args:
        x: rows, those of the first group first. [M, I]
        weight: a matrix for each group. [E, O, I]
        sizes: number of rows of each group; their sum is M. [E]

    Returns:
        [M, O] in the type of x.

    Raises:
        ValueError: an argument has a wrong shape or type.
    """
    operations.check_grouped_linear(operand("x", x), operand("weight", weight), sizes.shape)
    return jax.lax.ragged_dot(x, weight.astype(x.dtype).swapaxes(1, 2), sizes.astype(jnp.int32))


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, " d"], epsilon: float) -> Float[Array, "*b d"]:
    """Return ``x / sqrt(mean(x**2) + epsilon) * weight``, with the mean over the last axis.

    Args:
        x: input. [..., D]
        weight: gain. [D]
        epsilon: added to the mean square; > 0.

    Returns:
        The normalised input, computed in at least float32, in the type of x. [..., D]

    Raises:
        ValueError: an argument has a wrong shape, type or value.

    Reference: Zhang and Sennrich, arXiv 1910.07467, eq. 4. Here epsilon is added under the root.
    """
    operations.check_norm(operand("x", x), operand("weight", weight), epsilon)
    wide = at_least_float32(x)
    inverse_rms = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * inverse_rms * weight).astype(x.dtype)


def short_convolution(
    x: Float[Array, "b t c"], weight: Float[Array, "c w"], before: Int[Array, "*b t"]
) -> Float[Array, "b t c"]:
    """Convolve each channel over a token and the W - 1 tokens before it in its sequence, then apply SiLU.

    Args:
        x: input. [B, T, C]
        weight: coefficients of each channel; the last is that of the token itself. [C, W]
        before: number of tokens before each token in its sequence. [T] or [B, T] integer

    Returns:
        The convolved channels in the type of x. [B, T, C]

    Raises:
        ValueError: an argument has a wrong shape or type.
    """
    operations.check_convolution(operand("x", x), operand("weight", weight), operand("before", before))

    def convolved(x: Array, weight: Array) -> Array:
        mixed = x * weight[:, -1]
        for back in range(1, min(weight.shape[1], x.shape[1])):
            earlier = jnp.pad(x[:, :-back], ((0, 0), (back, 0), (0, 0)))
            mixed = mixed + jnp.where((before >= back)[..., None], earlier, 0) * weight[:, -1 - back]
        return jax.nn.silu(mixed)

    return jax.checkpoint(convolved)(x, weight.astype(x.dtype))  # backward recomputes the shifted copies


def rotary_embedding(
    x: Float[Array, "b t h d"], positions: Int[Array, " t"], base: float, width: int | None = None
) -> Float[Array, "b t h d"]:
    """Rotate the pairs (x[i], x[i + w/2]) of the first w channels by the angle position * base**(-2i/w).

    Args:
        x: queries or keys. [B, T, H, d]
        positions: positions of the tokens within their sequence. [T] integer
        base: base of the wavelengths.
        width: number w of rotated channels, even; the other channels stay. None: d.

    Returns:
        The rotated queries or keys in the type of x. [B, T, H, d]

    Raises:
        ValueError: an argument has a wrong shape, type or value.

    Reference: Su et al., arXiv 2104.09864, eq. 15. Here the channels of a pair are w/2 apart (GPT-NeoX order).
    """
    operations.check_rotary(operand("x", x), operand("positions", positions), base, width)
    width = x.shape[-1] if width is None else width
    if width == 0:
        return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = jnp.asarray(rotary_frequencies(width, base), wide)
    angle = positions.astype(wide)[:, None, None] * frequencies
    cos = jnp.cos(angle).astype(x.dtype)
    sin = jnp.sin(angle).astype(x.dtype)
    first, second, passed = jnp.split(x, (width // 2, width), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, passed], axis=-1)


def kernel_backend(impl: str, x: Array) -> Any | None:
    """Return the module that runs the shared Triton kernels, or None if the framework's operations compute.

    Args:
        impl: see diptych.plans.model.implementation.
        x: an argument of the operation; its device decides if impl is ``"auto"``.

    Raises:
        ValueError: an unknown impl.
        ModuleNotFoundError: Triton is missing, or on a CPU PyTorch, which Triton's interpreter needs.
    """
    platform = _platform(x)
    if not uses_kernels(impl, on_cuda=platform in ("gpu", "cuda")):
        return None
    require_packages("triton", *(("torch",) if platform == "cpu" else ()))
    from diptych_kernels import jax_backend as jax_ops

    return jax_ops


def _platform(x: Array) -> str:
    """Return the platform of x; for a traced or numpy array, the platform of JAX's default device."""
    if isinstance(x, Array) and not isinstance(x, Tracer):
        return next(iter(x.devices())).platform
    device = getattr(jax.config, "jax_default_device", None)
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def gelu(x: Float[Array, "*b f"], impl: str = "auto") -> Float[Array, "*b f"]:
    """Return ``x * Phi(x)``, with the exact normal distribution function Phi.

    Args:
        x: input. [..., F]
        impl: see diptych.plans.model.implementation.

    Returns:
        [..., F]

    Raises:
        ValueError: x has a wrong type, or impl is unknown.

    Reference: Hendrycks and Gimpel, arXiv 1606.08415.
    """
    operations.check_activation(operand("x", x))
    if kernels := kernel_backend(impl, x):
        return kernels.gelu(x)
    return jax.checkpoint(partial(jax.nn.gelu, approximate=False))(x)  # saves only x for backward, as PyTorch does


def swiglu(x: Float[Array, "*b f2"], impl: str = "auto") -> Float[Array, "*b f"]:
    """Return ``silu(gate) * value``.

    Args:
        x: gate and value, concatenated. [..., 2F]
        impl: see diptych.plans.model.implementation.

    Returns:
        [..., F]

    Raises:
        ValueError: x has an odd width or a wrong type, or impl is unknown.

    Reference: Shazeer, arXiv 2002.05202, eq. 6.
    """
    operations.check_gate(operand("x", x))
    if kernels := kernel_backend(impl, x):
        return kernels.swiglu(x)
    gate, value = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * value


def cross_entropy(logits: Float[Array, "b t v"], targets: Int[Array, "b t"]) -> Float[Array, ""]:
    """Return the mean negative log-likelihood of the targets, in nats per token; NaN if a target is no token id.

    Args:
        logits: [B, T, V]
        targets: token ids. [B, T] integer

    Raises:
        ValueError: shapes or types do not match.
    """
    operations.check_targets(operand("logits", logits), operand("targets", targets))
    log_probabilities = jax.nn.log_softmax(at_least_float32(logits), axis=-1)
    taken = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    return -jnp.mean(jnp.where((targets >= 0) & (targets < logits.shape[-1]), taken, jnp.nan))
