"""Pure functions on arrays: what layers are made of.

Twin of ``reference_torch/ops.py``: same names, same order, same signatures. Nothing here owns
parameters or state; randomness comes in as a counter (:class:`DropoutState`).
"""

from collections.abc import Mapping
from contextvars import ContextVar
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
from diptych.plans.model.implementation import uses_kernels
from diptych.plans.model.parameters import ParameterSpec, initial_value, rotary_frequencies
from diptych.plans.model.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, dropout_threshold
from jax_impl.attention import causal_attention as causal_attention
from jax_impl.attention import fused_attention as fused_attention
from jax_impl.attention import masked_attention as masked_attention
from jax_impl.operands import at_least_float32, given_operand, operand


def parameter(config: TransformerConfig, name: str, spec: ParameterSpec) -> nnx.Param:
    """A parameter with the initial value diptych/plans/model/parameters.py gives it.

    Args:
        config: gives seed and type.
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
    """Upper and lower word of the 64-bit product a * b, by 16-bit halves."""
    b_low, b_high = np.uint32(b & 0xFFFF), np.uint32(b >> 16)
    a_low, a_high = a & 0xFFFF, a >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    carry = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (carry >> 16), a * np.uint32(b)


def philox_4x32(key: tuple, counter: tuple) -> tuple[Array, Array, Array, Array]:
    """Four random words per counter, bit-equal to diptych.plans.model.philox.

    Args:
        key: two words < 2**32, each a number or an integer scalar.
        counter: four words, each a number < 2**32 or an integer array (broadcast together), of which the lower 32
            bits count.

    Returns:
        Four arrays of words, uint32.

    Raises:
        ValueError: a number that is no 32-bit word.

    Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    for place, word in enumerate((*key, *counter)):
        if not isinstance(word, Array | np.ndarray):
            operations.check_word(f"key[{place}]" if place < 2 else f"counter[{place - 2}]", word)
    words = [jnp.asarray(word).astype(jnp.uint32) for word in (*counter, *key)]
    return _philox_rounds(*words, rounds=ROUNDS)


@partial(
    jax.jit, static_argnames="rounds"
)  # traced once for all masks of a shape, which are most of a model's operations
def _philox_rounds(
    c0: Array, c1: Array, c2: Array, c3: Array, k0: Array, k1: Array, *, rounds: int
) -> tuple[Array, Array, Array, Array]:
    for _ in range(rounds):
        (high0, low0), (high2, low2) = _multiply_high_low(c0, MULTIPLIERS[0]), _multiply_high_low(c2, MULTIPLIERS[1])
        c0, c1 = high2 ^ c1 ^ k0, low2
        c2, c3 = high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint32(KEY_STEPS[0]), k1 + np.uint32(KEY_STEPS[1])
    return c0, c1, c2, c3


class DropoutState(NamedTuple):
    """What a dropout mask is a function of, besides its site."""

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
    """Number the rows of a batch: row = sample * seq_length + position modulo 2**64, as two 32-bit words.

    Args:
        seed: < 2**32.
        step: training step, < 2**32.
        samples: numbers of the sequences within the global batch, of rows or of every token. [B] or [B, T] integer
        positions: positions of the tokens within their sequence. [T] integer
        seq_length: of the whole model, so that rows of different sequences never meet.

    Raises:
        ValueError: names the argument, what was expected, what came.
    """
    operations.check_rows(operand("samples", samples), operand("positions", positions), seq_length)
    for name, word in (("seed", seed), ("step", step)):
        _check_word(name, word)
    (low, high), (position_low, position_high) = _words(samples), _words(positions)
    low, high = (part if part.ndim == 2 else part[:, None] for part in (low, high))
    carried, low = _multiply_high_low(low, seq_length)
    row_low = low + position_low
    return DropoutState(seed, step, row_low, carried + high * np.uint32(seq_length) + position_high + (row_low < low))


def _words(x: Array) -> tuple[Array, Array]:
    """Lower and upper word of integers extended to 64 bits."""
    if x.dtype.itemsize == 8:
        return x.astype(jnp.uint32), (x >> 32).astype(jnp.uint32)
    high = -(x < 0).astype(jnp.int32) if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.zeros_like(x)
    return x.astype(jnp.uint32), high.astype(jnp.uint32)


def _check_word(name: str, word: Any) -> None:
    """Check a number; an integer scalar on a device, which may be traced, is not looked into."""
    if not isinstance(word, Array):
        operations.check_word(name, word)
        return
    operations.check_integers(**{name: operand(name, word)})
    operations.check_shape(name, word.shape, ())


def check_state(shape: tuple[int, ...], state: Any, site: Any) -> None:
    """Refuse a dropout state that is not of an array's rows.

    Args:
        shape: of the array's leading axes. [B, T]
        state: as dropout_state returns it.
        site: see diptych.plans.model.philox.

    Raises:
        ValueError: names the argument, what was expected, what came.
    """
    rows = {name: operand(f"state.{name}", getattr(state, name)) for name in ("row_low", "row_high")}
    operations.check_dropout_rows(shape, **rows)
    for name, word in (("state.seed", state.seed), ("state.step", state.step), ("site", site)):
        _check_word(name, word)


def dropout(x: Float[Array, "b t *rest"], rate: float, state: DropoutState, site: int | Integer[Array, ""]) -> Array:
    """Zero elements with probability ``rate`` and scale the others by 1 / (1 - rate).

    The mask is a function of (seed, site, step, row, column) alone: it is the same in PyTorch and in
    the kernels, and under any layout of the batch.

    Args:
        x: any floating array; the axes after the second are numbered as one. [B, T, ...]
        rate: in [0, 1).
        state: rows of the batch.
        site: number of the place in the model, see diptych.plans.model.philox.

    Raises:
        ValueError: names the argument, what was expected, what came.
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
    return jax.checkpoint(masked)(x, step, state.row_low, state.row_high)  # the mask is made again in backward


def add_bias(x: Float[Array, "*b o"], bias: Float[Array, " o"] | None) -> Float[Array, "*b o"]:
    """Return ``x + bias`` in the type of x; x itself where there is no bias."""
    operations.check_bias(operand("x", x), given_operand("bias", bias))
    return x if bias is None else x + bias.astype(x.dtype)


def linear(
    x: Float[Array, "*b i"], weight: Float[Array, "o i"], bias: Float[Array, " o"] | None = None
) -> Float[Array, "*b o"]:
    """Return ``x @ weight.T + bias``, in the type of x."""
    operations.check_linear(operand("x", x), operand("weight", weight), given_operand("bias", bias))
    taps = _TAPS.get()
    product = _product if taps is None else taps.product
    return add_bias(product(x, weight), bias)


def _product(x: Array, weight: Array) -> Array:
    return x @ weight.T.astype(x.dtype)


class _LinearTaps:
    """While active, hands out what the gradients of some linear maps' weights are made of, not the gradients.

    A tap is a pair of zeros of the shapes of a map's input and output. The map does not read it, but gives as its
    gradient the map's input and the gradient of its output, which is all that the weight's gradient is made of. So a
    backward with taps costs no weight gradient, and these are computed later: weight.T's is x.T @ g. As the tap goes
    through jax.vjp like any argument, this works under jax.checkpoint too.

    Args:
        weights: by name; the very arrays that linear will be given.
        taps: by name; None: none are given, shapes are only noted.
    """

    def __init__(self, weights: Mapping[str, Array], taps: Mapping[str, tuple[Array, Array]] | None = None) -> None:
        self.shapes: dict[str, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]] = {}
        self._names, self._taps = {id(weight): name for name, weight in weights.items()}, taps

    def __enter__(self) -> "_LinearTaps":
        self._before = _TAPS.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _TAPS.reset(self._before)

    def product(self, x: Array, weight: Array) -> Array:
        """x @ weight.T, with the weight's tap if it has one."""
        name = self._names.get(id(weight))
        if name is None:
            return _product(x, weight)
        assert name not in self.shapes, f"{name} is the weight of two linear maps, but has one tap"
        out = (*x.shape[:-1], weight.shape[0])
        self.shapes[name] = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(out, x.dtype)
        return _product(x, weight) if self._taps is None else _tapped_product(x, weight, *self._taps[name])


_TAPS: ContextVar[_LinearTaps | None] = ContextVar("linear taps", default=None)


@jax.custom_vjp
def _tapped_product(x: Array, weight: Array, input_tap: Array, output_tap: Array) -> Array:
    return _product(x, weight)


def _tapped_forward(x: Array, weight: Array, *taps: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, weight), (x, weight)


def _tapped_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, None, Array, Array]:
    x, weight = kept
    return grad @ weight.astype(x.dtype), None, x, grad


_tapped_product.defvjp(_tapped_forward, _tapped_backward)


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, " d"], epsilon: float) -> Float[Array, "*b d"]:
    """``x / sqrt(mean(x**2) + epsilon) * weight`` over the last axis.

    Reference: Zhang and Sennrich, arXiv 1910.07467, eq. 4 (epsilon added under the root).
    """
    operations.check_norm(operand("x", x), operand("weight", weight), epsilon)
    wide = at_least_float32(x)
    inverse_rms = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * inverse_rms * weight).astype(x.dtype)


def short_convolution(
    x: Float[Array, "b t c"], weight: Float[Array, "c w"], before: Int[Array, "*b t"]
) -> Float[Array, "b t c"]:
    """Convolve every channel over a token and those before it in its sequence, then SiLU.

    Args:
        x: [B, T, C]
        weight: a channel's taps, the last one the token's own. [C, W]
        before: how many tokens of its sequence come before each. [T] or [B, T]
    """
    operations.check_convolution(operand("x", x), operand("weight", weight), operand("before", before))

    def convolved(x: Array, weight: Array) -> Array:
        mixed = x * weight[:, -1]
        for back in range(1, min(weight.shape[1], x.shape[1])):
            earlier = jnp.pad(x[:, :-back], ((0, 0), (back, 0), (0, 0)))
            mixed = mixed + jnp.where((before >= back)[..., None], earlier, 0) * weight[:, -1 - back]
        return jax.nn.silu(mixed)

    return jax.checkpoint(convolved)(x, weight.astype(x.dtype))  # shifted copies are made again in backward


def rotary_embedding(x: Float[Array, "b t h d"], positions: Int[Array, " t"], base: float) -> Float[Array, "b t h d"]:
    """Turn the pairs (x[i], x[i + d/2]) by the angle position * base**(-2i/d).

    Args:
        x: queries or keys; d even. [B, T, H, d]
        positions: of the tokens within their sequence. [T]
        base: of the wavelengths.

    Reference: Su et al., arXiv 2104.09864, eq. 15, with the pairs half a head apart (GPT-NeoX order).
    """
    operations.check_rotary(operand("x", x), operand("positions", positions), base)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = jnp.asarray(rotary_frequencies(x.shape[-1], base), wide)
    angle = positions.astype(wide)[:, None, None] * frequencies
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def kernel_backend(impl: str, x: Array) -> Any | None:
    """The module that runs the shared kernels on what x is, or None where the operations here compute.

    Args:
        impl: see diptych.plans.model.implementation.

    Raises:
        ValueError: an unknown impl.
    """
    if not uses_kernels(impl, on_cuda=_platform(x) in ("gpu", "cuda")):
        return None
    from diptych_kernels import jax_backend as jax_ops

    return jax_ops


def _platform(x: Array) -> str:
    """Where x lies; inside a traced function, or of a numpy array, where JAX puts things by default."""
    if isinstance(x, Array) and not isinstance(x, Tracer):
        return next(iter(x.devices())).platform
    device = getattr(jax.config, "jax_default_device", None)
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def gelu(x: Float[Array, "*b f"], impl: str = "auto") -> Float[Array, "*b f"]:
    """``x * Phi(x)`` with the exact normal distribution function. Reference: arXiv 1606.08415."""
    operations.check_activation(operand("x", x))
    if kernels := kernel_backend(impl, x):
        return kernels.gelu(x)
    return jax.checkpoint(partial(jax.nn.gelu, approximate=False))(x)  # keeps x alone, as PyTorch does


def swiglu(x: Float[Array, "*b f2"], impl: str = "auto") -> Float[Array, "*b f"]:
    """``silu(gate) * value`` where x holds gate and value side by side. Reference: arXiv 2002.05202, eq. 6."""
    operations.check_gate(operand("x", x))
    if kernels := kernel_backend(impl, x):
        return kernels.swiglu(x)
    gate, value = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * value


def cross_entropy(logits: Float[Array, "b t v"], targets: Int[Array, "b t"]) -> Float[Array, ""]:
    """Return the mean negative log-likelihood of the targets, in nats per token; NaN if a target is no token id.

    Raises:
        ValueError: shapes or types disagree.
    """
    operations.check_targets(operand("logits", logits), operand("targets", targets))
    log_probabilities = jax.nn.log_softmax(at_least_float32(logits), axis=-1)
    taken = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    return -jnp.mean(jnp.where((targets >= 0) & (targets < logits.shape[-1]), taken, jnp.nan))
