"""The operations that layers consist of, as pure functions on tensors.

Mirrors ``jax_impl/ops.py``: same names, same order, same signatures. No function here owns parameters or state.
Randomness is an argument: a counter (:class:`DropoutState`).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from diptych.plans.config import TransformerConfig
from diptych.plans.model import operations
from diptych.plans.model.implementation import require_packages, uses_kernels
from diptych.plans.model.parameters import ParameterSpec, initial_value, rotary_frequencies
from diptych.plans.model.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, TILE_ROWS, dropout_threshold
from reference_torch.attention import causal_attention as causal_attention
from reference_torch.attention import fused_attention as fused_attention
from reference_torch.attention import masked_attention as masked_attention
from reference_torch.autograd import as_one_operation, is_transformed, without_autocast
from reference_torch.operands import at_least_float32, given_operand, operand

MASK_32 = 0xFFFFFFFF


def parameter(config: TransformerConfig, name: str, spec: ParameterSpec) -> torch.nn.Parameter:
    """Return a parameter with its initial value from diptych/plans/model/parameters.py.

    Args:
        config: determines seed and type.
        name: canonical name, e.g. ``decoder.layers.0.mlp.linear_fc1.weight``.
        spec: shape and distribution.
    """
    value = torch.from_numpy(initial_value(config.seed, name, spec))
    return torch.nn.Parameter(value.to(getattr(torch, config.params_dtype)))


def philox_4x32(key: tuple[int, int], counter: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random words per counter, bitwise equal to diptych.plans.model.philox.

    Args:
        key: two words < 2**32.
        counter: four words, each a number < 2**32 or an integer tensor, broadcast together; only the lower 32 bits of
            a tensor are used.

    Returns:
        Four tensors of words, int64, because torch lacks uint32 arithmetic. Products wrap modulo 2**64, which does not
        change their lower bits.

    Raises:
        ValueError: a number is no 32-bit word.

    Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    for index, word in enumerate((*key, *counter)):
        if not isinstance(word, Tensor):
            operations.check_word(f"key[{index}]" if index < 2 else f"counter[{index - 2}]", word)
    return _philox_rounds(key, tuple(torch.as_tensor(word, dtype=torch.int64) & MASK_32 for word in counter))


def _philox_rounds(key: tuple[int, int], counter: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the rounds of Philox on checked words, each below 2**32."""
    c0, c1, c2, c3 = (torch.as_tensor(word, dtype=torch.int64) for word in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        product0 = c0 * MULTIPLIERS[0]
        product2 = c2 * MULTIPLIERS[1]
        c0 = ((product2 >> 32) & MASK_32) ^ c1 ^ k0
        c1 = product2 & MASK_32
        c2 = ((product0 >> 32) & MASK_32) ^ c3 ^ k1
        c3 = product0 & MASK_32
        k0 = (k0 + KEY_STEPS[0]) & MASK_32
        k1 = (k1 + KEY_STEPS[1]) & MASK_32
    return c0, c1, c2, c3


class DropoutState(NamedTuple):
    """The counter of a dropout mask: with the site, it determines the mask."""

    seed: int
    step: int
    row_low: Int[Tensor, "b t"]
    row_high: Int[Tensor, "b t"]


def dropout_state(
    seed: int, step: int, samples: Int[Tensor, "*b"], positions: Int[Tensor, " t"], seq_length: int
) -> DropoutState:
    """Return a dropout state with rows (sample * seq_length + position) modulo 2**64, as two 32-bit words.

    Args:
        seed: < 2**32.
        step: training step, < 2**32.
        samples: index in the global batch of each sequence or of each token's sequence. [B] or [B, T] int64
        positions: positions of the tokens within their sequence. [T] int64
        seq_length: sequence length of the model, so that sequences do not share rows.

    Raises:
        ValueError: an argument has a wrong shape, type or value.
    """
    operations.check_rows(operand("samples", samples), operand("positions", positions), seq_length)
    for name, word in (("seed", seed), ("step", step)):
        operations.check_word(name, word)
    row = (samples if samples.dim() == 2 else samples[:, None]).long() * seq_length + positions.long()
    return DropoutState(seed, step, row & MASK_32, (row >> 32) & MASK_32)


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
        operations.check_word(name, word)


def dropout(x: Float[Tensor, "b t *rest"], rate: float, state: DropoutState, site: int) -> Tensor:
    """Zero elements with probability ``rate`` and scale the others by 1 / (1 - rate).

    The mask depends only on (seed, site, step, row, column). So JAX, the Triton kernels and every layout of the batch
    give the same mask.

    Args:
        x: any floating tensor; the axes after the second are flattened to columns. [B, T, ...]
        rate: in [0, 1).
        state: rows of the batch; backward raises an error if they were changed in place after forward.
        site: number of the dropout in the model, see diptych.plans.model.philox.

    Raises:
        ValueError: an argument has a wrong shape, type or value.
    """
    operations.check_dropout(operand("x", x), rate)
    check_state(tuple(x.shape[:2]), state, site)
    if rate == 0.0 or not x.numel():
        return x
    words = rate, state.seed, state.step, site
    if torch.compiler.is_compiling() or is_transformed(x, state.row_low, state.row_high):
        return _dropped_by_operations(x, state.row_low, state.row_high, *words)
    dropped: Any = _Dropout.apply
    return dropped(x, state.row_low, state.row_high, *words)


class _Dropout(torch.autograd.Function):
    """Dropout that saves no mask: backward recomputes it, or raises an error if the rows have changed.

    Rows are not saved through autograd, but compared by their version counters: saved-tensor hooks would take a saved
    tensor for a use of x, and keep x in memory.
    """

    @staticmethod
    def forward(ctx, x, *arguments):
        ctx.arguments = arguments
        ctx.versions = _versions(arguments)
        return _dropped(x, *arguments)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        if _versions(ctx.arguments) != ctx.versions:
            raise RuntimeError(
                "state: expected the rows that forward dropped by, got rows changed in place since; make a new state "
                "with dropout_state, or change a copy"
            )
        return _Dropout.apply(grad, *ctx.arguments), None, None, None, None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _dropped(tangent, *ctx.arguments)


def _versions(arguments: tuple[Any, ...]) -> list[int]:
    """Return how often each row tensor was changed in place; inference tensors have no version and count as 0."""
    return [0 if row.is_inference() else row._version for row in arguments[:2]]


def _dropped(x: Tensor, row_low: Tensor, row_high: Tensor, rate: float, *words: int) -> Tensor:
    """Zero the elements of x whose random word is below the threshold, and scale the others."""
    keep = _dropout_mask(math.prod(x.shape[2:]), row_low, row_high, rate, *words)
    return torch.where(keep.reshape(x.shape), x * (1.0 / (1.0 - rate)), 0.0)


def _dropout_mask(width: int, row_low: Tensor, row_high: Tensor, rate: float, *words: int) -> Tensor:
    """Return True for the elements that dropout keeps, [rows, width]; a function of its own, to release the words."""
    threshold = dropout_threshold(rate)
    keep = torch.empty(row_low.numel(), width + -width % 4, dtype=torch.bool, device=row_low.device)
    for number, tile in enumerate(_random_tiles(width, row_low, row_high, *words)):
        lanes = keep[number * TILE_ROWS : (number + 1) * TILE_ROWS].view(-1, keep.shape[1] // 4, 4)
        for lane, word in enumerate(tile):
            torch.ge(word, threshold, out=lanes[..., lane])
    return keep[:, :width]


def _dropped_by_operations(x: Tensor, row_low: Tensor, row_high: Tensor, rate: float, *words: int) -> Tensor:
    """Compute _dropped without in-place writes, which torch.func and torch.compile cannot trace."""
    width = math.prod(x.shape[2:])
    threshold = dropout_threshold(rate)
    tiles = _random_tiles(width, row_low, row_high, *words)
    keep = [torch.stack([word >= threshold for word in tile], -1).flatten(1)[:, :width] for tile in tiles]
    return torch.where(torch.cat(keep).reshape(x.shape), x * (1.0 / (1.0 - rate)), 0.0) if keep else x


def _random_tiles(
    width: int, row_low: Tensor, row_high: Tensor, seed: int, step: int, site: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield four words [rows, columns / 4] for each tile of rows."""
    low, high = (row.reshape(-1, 1).long() & MASK_32 for row in (row_low, row_high))
    quads = torch.arange((width + 3) // 4, device=low.device)
    for start in range(0, len(low), TILE_ROWS):
        rows = slice(start, start + TILE_ROWS)
        yield _philox_rounds((seed, site), (quads, low[rows], high[rows], step))


def add_bias(x: Float[Tensor, "*b o"], bias: Float[Tensor, " o"] | None) -> Float[Tensor, "*b o"]:
    """Return ``x + bias`` in the type of x, or x itself if bias is None.

    Args:
        x: input. [..., O]
        bias: bias; None: 0. [O]

    Raises:
        ValueError: an argument has a wrong shape or type.
    """
    operations.check_bias(operand("x", x), given_operand("bias", bias))
    return x if bias is None else x + bias.to(x.dtype)


def linear(
    x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None = None
) -> Float[Tensor, "*b o"]:
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
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def grouped_linear(
    x: Float[Tensor, "m i"], weight: Float[Tensor, "e o i"], sizes: Sequence[int]
) -> Float[Tensor, "m o"]:
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
    operations.check_grouped_linear(operand("x", x), operand("weight", weight), (len(sizes),))
    operations.check_group_sizes(sizes, len(x))
    return torch.cat([linear(rows, matrix) for rows, matrix in zip(x.split(list(sizes)), weight, strict=True)])


@as_one_operation
def rms_norm(x: Float[Tensor, "*b d"], weight: Float[Tensor, " d"], epsilon: float) -> Float[Tensor, "*b d"]:
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
    return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), epsilon).to(x.dtype)


@as_one_operation
def short_convolution(
    x: Float[Tensor, "b t c"], weight: Float[Tensor, "c w"], before: Int[Tensor, "*b t"]
) -> Float[Tensor, "b t c"]:
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
    weight = weight.to(x.dtype)
    if torch.compiler.is_compiling() or is_transformed(x, weight, before):
        return _convolved(x, weight, before)
    return _ShortConvolution.apply(x, weight, before)


def _convolved(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Compute the convolution and SiLU of short_convolution by shifted copies of x."""
    mixed = x * weight[:, -1]
    for back in range(1, min(weight.shape[1], x.shape[1])):
        earlier = F.pad(x[:, :-back], (0, 0, back, 0))
        mixed = mixed + torch.where((before >= back)[..., None], earlier, 0) * weight[:, -1 - back]
    return F.silu(mixed)


class _ShortConvolution(torch.autograd.Function):
    """A convolution that saves only its inputs: backward recomputes the shifted copies."""

    @staticmethod
    def forward(ctx, x, weight, before):
        ctx.save_for_backward(x, weight, before)
        return _convolved(x, weight, before)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, before = ctx.saved_tensors
        create_graph = torch.is_grad_enabled()
        leaves = [y if create_graph and y.requires_grad else y.detach().requires_grad_() for y in (x, weight)]
        with torch.enable_grad(), without_autocast(grad.device.type):
            mixed = _convolved(leaves[0], leaves[1], before)
            return *torch.autograd.grad(mixed, leaves, grad, create_graph=create_graph), None


@as_one_operation
def rotary_embedding(
    x: Float[Tensor, "b t h d"], positions: Int[Tensor, " t"], base: float, width: int | None = None
) -> Float[Tensor, "b t h d"]:
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
    half = width // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    frequencies = torch.from_numpy(rotary_frequencies(width, base)).to(x.device, wide)
    angle = positions.to(wide)[:, None, None] * frequencies
    cos = angle.cos().to(x.dtype)
    sin = angle.sin().to(x.dtype)
    first = x[..., :half]
    second = x[..., half:width]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., width:]], dim=-1)


def kernel_backend(impl: str, x: Tensor) -> Any | None:
    """Return the module that runs the shared Triton kernels, or None if the framework's own operations are used.

    Args:
        impl: see diptych.plans.model.implementation.
        x: an argument of the operation; its device decides if impl is ``"auto"``.

    Raises:
        ValueError: an unknown impl.
        ModuleNotFoundError: Triton is not installed.
    """
    if not uses_kernels(impl, on_cuda=x.is_cuda):
        return None
    require_packages("triton")
    from diptych_kernels import torch_backend as torch_ops

    return torch_ops


@as_one_operation
def gelu(x: Float[Tensor, "*b f"], impl: str = "auto") -> Float[Tensor, "*b f"]:
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
    return F.gelu(x, approximate="none")


@as_one_operation
def swiglu(x: Float[Tensor, "*b f2"], impl: str = "auto") -> Float[Tensor, "*b f"]:
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
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def cross_entropy(logits: Float[Tensor, "b t v"], targets: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Return the mean negative log-likelihood of the targets, in nats per token.

    Args:
        logits: [B, T, V]
        targets: token ids. [B, T] integer

    Raises:
        ValueError: shapes or types do not match.
        IndexError: a target is no token id. On a CPU the message names the id; on other devices the kernel fails.
    """
    operations.check_targets(operand("logits", logits), operand("targets", targets))
    ids = targets.flatten().long()
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed(targets):
        ids = ids.clamp(min=-1)  # no id is equal to ignore_index
    elif len(ids):
        operations.check_token_ids(int(targets.min()), int(targets.max()), logits.shape[-1])
    logits = at_least_float32(logits)
    return F.cross_entropy(logits.flatten(0, 1), ids, ignore_index=torch.iinfo(torch.int64).min)
