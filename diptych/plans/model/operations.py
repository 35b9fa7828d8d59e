"""Validation of the arguments of array operations, shared by both backends and the kernels.

A backend describes an array by an :class:`Operand`; the checks use shapes, type names and numbers only. A failed check
raises a ValueError that names the argument; check_token_ids raises an IndexError.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

FLOATING = ("float16", "bfloat16", "float32", "float64")
"""Types that operations compute with."""

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

Shape = tuple[int, ...]


class Operand(NamedTuple):
    """The shape of an array and numpy's name of its type."""

    shape: Shape
    dtype: str


def operand_error(name: str, found: str) -> ValueError:
    """Return the error for an argument that is not an array of the backend's framework.

    Args:
        name: name of the argument.
        found: description of the given value, e.g. the name of its class.
    """
    return ValueError(f"{name}: expected a dense array of the backend's framework, got {found}")


def check_floating(**operands: Operand | None) -> None:
    """Reject arrays whose type is not one of FLOATING.

    Args:
        operands: arrays by argument name; None for an argument that was not given.

    Raises:
        ValueError: a type is not supported; the message names the argument.
    """
    for name, x in operands.items():
        if x is not None and x.dtype not in FLOATING:
            raise ValueError(f"{name}: expected a type among {', '.join(FLOATING)}, got {x.dtype}")


def check_integers(**operands: Operand) -> None:
    """Reject arrays that do not contain integers; booleans are not integers."""
    for name, x in operands.items():
        if x.dtype not in INTEGERS:
            raise ValueError(f"{name}: expected integers, got {x.dtype}")


def check_least_axes(name: str, shape: Shape, least: int) -> None:
    """Reject an array with fewer than ``least`` axes."""
    if len(shape) < least:
        raise ValueError(f"{name}: expected at least {least} axes, got shape {tuple(shape)}")


def check_axes(name: str, shape: Shape, letters: str) -> None:
    """Reject an array that does not have one axis per letter of e.g. ``"BTSD"``."""
    if len(shape) != len(letters):
        raise ValueError(f"{name}: expected shape [{', '.join(letters)}], got {tuple(shape)}")


def check_shape(name: str, shape: Shape, expected: Shape) -> None:
    """Reject a shape that differs from the expected one."""
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)}, got {tuple(shape)}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float | np.floating)


def check_rate(rate: Any) -> None:
    """Reject a dropout rate outside [0, 1)."""
    if not _is_number(rate) or not 0.0 <= rate < 1.0:
        raise ValueError(f"rate: expected a number in [0, 1), got {rate!r}")


def check_epsilon(epsilon: Any, name: str = "epsilon") -> None:
    """Reject an epsilon that is not a finite number of at least 0."""
    if not _is_number(epsilon) or not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {epsilon!r}")


def check_word(name: str, value: Any) -> None:
    """Reject a value that is not an unsigned 32-bit word of Philox's key or counter.

    Implementations would differ on larger numbers, because some truncate them.
    """
    if not _is_integer(value) or not 0 <= value < 2**32:
        raise ValueError(f"{name}: expected an integer in [0, 2**32), got {value!r}")


def check_iterations(iterations: Any, last: Any) -> None:
    """Reject fewer than one Sinkhorn iteration, and a last normalization other than ``row`` or ``column``."""
    if not _is_integer(iterations):
        raise ValueError(f"iterations: expected an integer, got {iterations!r}")
    if iterations < 1:
        raise ValueError(f"iterations: expected at least 1, got {iterations}")
    if last not in ("row", "column"):
        raise ValueError(f"last: expected 'row' or 'column', got {last!r}")


def check_matrices(logits: Operand) -> None:
    """Reject logits that are not a batch of square matrices [..., S, S]."""
    check_floating(logits=logits)
    check_least_axes("logits", logits.shape, 2)
    check_shape("logits", logits.shape, (*logits.shape[:-1], logits.shape[-2]))
    if not logits.shape[-1]:
        raise ValueError(f"logits: expected matrices of at least one row, got shape {tuple(logits.shape)}")


def check_dropout_rows(shape: Shape, **rows: Operand) -> None:
    """Reject row numbers of a dropout state that do not match an array.

    Args:
        shape: leading axes of the array, [B, T].
        rows: row numbers of the state, ``row_low`` and ``row_high``. [B, T]
    """
    for name, x in rows.items():
        check_shape(f"state.{name}", x.shape, shape)
        check_integers(**{f"state.{name}": x})


def check_dropout(x: Operand, rate: Any) -> None:
    """Reject an array or rate for which no dropout mask can be drawn."""
    check_floating(x=x)
    check_least_axes("x", x.shape, 2)
    check_rate(rate)


def check_rows(samples: Operand, positions: Operand, seq_length: Any) -> None:
    """Reject sample numbers, positions or a sequence length that ops.dropout_state cannot number rows by."""
    check_integers(samples=samples, positions=positions)
    check_axes("positions", positions.shape, "T")
    if len(samples.shape) not in (1, 2):
        raise ValueError(f"samples: expected shape [B] or [B, T], got {tuple(samples.shape)}")
    if len(samples.shape) == 2:
        check_shape("samples", samples.shape, (samples.shape[0], positions.shape[0]))
    check_word("seq_length", seq_length)


def check_bias(x: Operand, bias: Operand | None, width: int | None = None) -> None:
    """Reject a bias that does not have one element per column.

    Args:
        x: array to which the bias is added, or input of the linear layer. [..., D]
        bias: the bias; None: no bias. [width]
        width: columns of the result; None: D.
    """
    check_floating(x=x, bias=bias)
    check_least_axes("x", x.shape, 1)
    if bias is not None:
        check_shape("bias", bias.shape, (x.shape[-1] if width is None else width,))


def check_linear(x: Operand, weight: Operand, bias: Operand | None) -> None:
    """Reject a weight [O, I] or bias [O] that does not fit a linear layer of the last axis of x."""
    check_floating(x=x, weight=weight, bias=bias)
    check_least_axes("x", x.shape, 1)
    check_axes("weight", weight.shape, "OI")
    check_shape("weight", weight.shape, (weight.shape[0], x.shape[-1]))
    check_bias(x, bias, weight.shape[0])


def check_grouped_linear(x: Operand, weight: Operand, sizes: tuple[int, ...]) -> None:
    """Reject weights [E, O, I], or a shape of sizes other than [E], that do not fit a map of groups of rows [M, I]."""
    check_floating(x=x, weight=weight)
    check_axes("x", x.shape, "MI")
    check_axes("weight", weight.shape, "EOI")
    check_shape("weight", weight.shape, (*weight.shape[:2], x.shape[1]))
    check_shape("sizes", sizes, weight.shape[:1])


def check_group_sizes(sizes: Sequence[int], rows: int) -> None:
    """Reject sizes of groups that are not those of all rows."""
    if min(sizes, default=0) < 0 or sum(sizes) != rows:
        raise ValueError(f"sizes: expected numbers of rows with sum {rows}, the rows of x, got {list(sizes)}")


def check_norm(x: Operand, weight: Operand, epsilon: Any) -> None:
    """Reject arguments of an RMSNorm over the last axis that do not fit each other."""
    check_floating(x=x, weight=weight)
    check_least_axes("x", x.shape, 1)
    check_shape("weight", weight.shape, x.shape[-1:])
    check_epsilon(epsilon)


def check_convolution(x: Operand, weight: Operand, before: Operand) -> None:
    """Reject arguments of a causal convolution of x [B, T, C] with weight [C, W] that do not fit each other."""
    check_floating(x=x, weight=weight)
    check_axes("x", x.shape, "BTC")
    check_axes("weight", weight.shape, "CW")
    check_shape("weight", weight.shape, (x.shape[-1], max(weight.shape[1], 1)))
    check_integers(before=before)
    if before.shape not in (x.shape[:2], x.shape[1:2]):
        raise ValueError(f"before: expected shape {x.shape[1:2]} or {x.shape[:2]}, got {tuple(before.shape)}")


def check_rotary(x: Operand, positions: Operand, base: Any, width: Any = None) -> None:
    """Reject arguments of the rotary embedding.

    Args:
        x: queries or keys. [B, T, H, d]
        positions: positions. [T]
        base: base of the wavelengths.
        width: number of turned channels, even and at most d; None: d.
    """
    check_floating(x=x)
    check_axes("x", x.shape, "BTHd")
    if width is None and x.shape[-1] % 2:
        raise ValueError(f"x: expected heads of an even width, got {x.shape[-1]}")
    if width is not None and (not isinstance(width, int) or width % 2 or not 0 <= width <= x.shape[-1]):
        raise ValueError(f"width: expected an even number of channels of at most {x.shape[-1]}, got {width!r}")
    if positions.dtype not in FLOATING:
        check_integers(positions=positions)
    check_shape("positions", positions.shape, x.shape[1:2])
    if not _is_number(base) or not (math.isfinite(base) and base > 0):
        raise ValueError(f"base: expected a positive finite number, got {base!r}")


def check_attention(q: Operand, k: Operand, v: Operand, mask: Operand | None, name: str, keys: bool = False) -> None:
    """Reject queries, keys, values or a mask that do not fit each other.

    Args:
        q: queries. [B, T, H, d]
        k: keys. [B, T, G, d], with ``keys`` [B, S, G, d]
        v: values, of the shape of k but for the width. [B, T, G, e]
        mask: attention mask. [B, T, T], with ``keys`` [T, S]; None: no mask.
        name: name of the mask's argument.
        keys: allow other tokens for keys than for queries.
    """
    check_floating(q=q, k=k, v=v)
    for letter, x in (("q", q), ("k", k), ("v", v)):
        check_axes(letter, x.shape, "BTHd" if letter == "q" else "BSGd" if keys else "BTGd")
        if x.dtype != q.dtype:
            raise ValueError(f"{letter}: expected {q.dtype}, the type of q, got {x.dtype}")
    batch, length, heads, width = q.shape
    tokens = k.shape[1] if keys else length
    groups = k.shape[2]
    check_shape("k", k.shape, (batch, tokens, groups, width))
    check_shape("v", v.shape, (batch, tokens, groups, v.shape[3]))
    if not width:
        raise ValueError("q: expected heads of at least one channel, got 0")
    if not groups or heads % groups:
        raise ValueError(f"k: expected a divisor of q's {heads} heads as number of groups, got {groups}")
    if mask is not None:
        check_shape(name, mask.shape, (length, tokens) if keys else (batch, length, length))
        if mask.dtype != "bool":
            raise ValueError(f"{name}: expected bool, got {mask.dtype}")


def check_gate(x: Operand) -> None:
    """Reject an array that does not contain gate and value side by side on its last axis."""
    check_activation(x)
    if x.shape[-1] % 2:
        raise ValueError(f"x: expected gate and value side by side, an even width, got {x.shape[-1]}")


def check_activation(x: Operand) -> None:
    """Reject an array on which an activation function cannot be computed."""
    check_floating(x=x)
    check_least_axes("x", x.shape, 1)


def check_targets(logits: Operand, targets: Operand) -> None:
    """Reject targets that do not have one token id for each row of logits [B, T, V]."""
    check_floating(logits=logits)
    check_axes("logits", logits.shape, "BTV")
    check_shape("targets", targets.shape, logits.shape[:-1])
    check_integers(targets=targets)


def check_token_ids(least: int, most: int, vocabulary: int) -> None:
    """Reject token ids outside [0, vocabulary).

    Args:
        least: smallest token id.
        most: largest token id.
        vocabulary: number of token ids.

    Raises:
        IndexError: a token id is out of range; the message names it.
    """
    for found in (least, most):
        if not 0 <= found < vocabulary:
            raise IndexError(f"targets: expected token ids in [0, {vocabulary}), got {found}")


def check_streams(name: str, x: Operand) -> tuple[int, int, int, int]:
    """Return the sizes B, T, S and D of residual streams; reject an array of another shape or type."""
    check_floating(**{name: x})
    check_axes(name, x.shape, "BTSD")
    batch, length, streams, width = x.shape
    return batch, length, streams, width


def check_mappings(
    x: Operand, phi: Operand, alpha: Operand, bias: Operand, rms_epsilon: Any, mhc_epsilon: Any, is_head: bool = False
) -> None:
    """Reject parameters of a hyper-connection, or of a learned head, that do not fit the streams x [B, T, S, D]."""
    _, _, streams, width = check_streams("x", x)
    check_floating(phi=phi, alpha=alpha, bias=bias)
    columns = streams if is_head else streams * (streams + 2)
    check_shape("phi", phi.shape, (streams * width, columns))
    check_shape("alpha", alpha.shape, (1 if is_head else 3,))
    check_shape("bias", bias.shape, (columns,))
    check_epsilon(rms_epsilon, "rms_epsilon")
    check_epsilon(mhc_epsilon, "mhc_epsilon")


def check_aggregate(x: Operand, h_pre: Operand) -> None:
    """Reject coefficients h_pre that do not have the shape [B, T, S] of the residual streams x."""
    check_streams("x", x)
    check_floating(h_pre=h_pre)
    check_shape("h_pre", h_pre.shape, x.shape[:-1])


def check_mix(h_res: Operand, residual: Operand) -> None:
    """Reject matrices h_res that do not have the shape [B, T, S, S] of the residual streams."""
    *_, streams, _ = check_streams("residual", residual)
    check_floating(h_res=h_res)
    check_shape("h_res", h_res.shape, (*residual.shape[:-1], streams))


def check_expanded(output: Operand, bias: Operand | None, h_post: Operand) -> None:
    """Reject an output [B, T, D], bias [D] and coefficients h_post [B, T, S] that do not fit each other."""
    check_floating(output=output, bias=bias, h_post=h_post)
    check_axes("output", output.shape, "BTD")
    check_axes("h_post", h_post.shape, "BTS")
    check_shape("h_post", h_post.shape, (*output.shape[:-1], h_post.shape[-1]))
    check_bias(output, bias)


def check_written(
    residual: Operand, h_res: Operand | None, output: Operand, bias: Operand | None, h_post: Operand, rate: Any
) -> None:
    """Reject arguments of the write to the residual streams that do not fit each other."""
    *lead, streams, width = check_streams("residual", residual)
    check_expanded(output, bias, h_post)
    check_shape("output", output.shape, (*lead, width))
    check_shape("h_post", h_post.shape, (*lead, streams))
    if h_res is not None:
        check_mix(h_res, residual)
    check_rate(rate)


def check_same_type(name: str, dtype: str, other: str, expected: str) -> None:
    """Reject an array whose type differs from that of the array to which it is added."""
    if dtype != expected:
        raise ValueError(f"{name}: expected the type of {other}, {expected}, got {dtype}; cast one of them")
