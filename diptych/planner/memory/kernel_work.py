"""Work of the Triton kernels, per operation: what a launch moves, multiplies and executes.

`diptych plan --impl triton` takes times from here instead of from the operations of PyTorch. The kernels of
hyper-connections and activation functions are limited by their bytes, those of the delta rule also by their
instructions. Bytes follow from the arguments of each launch. Instructions were counted in machine code
(kernels/diptych_kernels/launch_times.py): warp instructions per token and value head on sm_90, in bfloat16 with
K = V = 128 and chunks of 64 tokens. Tests compare both with the kernels.
"""

from collections.abc import Mapping
from typing import NamedTuple

from diptych.planner.memory.rule import RuleShape
from diptych.plans.model.delta_rule import CHUNK_SIZE


class Work(NamedTuple):
    """The work of a launch."""

    moved: float = 0.0
    """Bytes read and written."""
    flops: float = 0.0
    """Floating-point operations in matrix products."""
    instructions: float = 0.0
    """Instructions of all warps."""


class KernelWork(NamedTuple):
    """The launches of an operation; none where another operation's kernel does the work."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()


COUNTED = 128
"""Channels of keys and of values for which instructions were counted."""
INSTRUCTIONS: Mapping[str, float] = {
    "decayed": 252,
    "products_by_channel": 276,
    "products_by_head": 72,
    "solve": 159,
    "scan_forward, kda": 154,
    "scan_forward, gdn": 181,
    "scan_forward of states, kda": 131,
    "scan_forward of states, gdn": 152,
    "scan_backward, kda": 154,
    "scan_backward, gdn": 191,
    "state_gradients": 186,
    "product_gradients": 96,
    "channel_gradients": 736,
    "gate_gradients": 215,
    "head_gradients": 354,
    "sum_heads": 18,
}
"""Warp instructions per token and value head, at most; the counts may be smaller by a twentieth."""
BELOW_DIAGONAL = 5 / 8
"""Share of the tiles of 16 tokens in a chunk's matrices that are on or below the diagonal."""


def mappings(tokens: int, streams: int, width: int, item: int, wide: int) -> KernelWork:
    """Return the work of projection and coefficients of a hyper-connection.

    The backward of the projection writes the whole gradient of the streams, with those of their other uses.

    Args:
        tokens: number of tokens.
        streams: residual streams. S
        width: channels of a stream. D
        item: bytes of an element of the streams.
        wide: bytes of a coefficient.
    """
    row = streams * width * item
    columns = streams * (streams + 2) * wide
    project = Work(tokens * (row + columns + wide))
    coefficients = Work(tokens * (2 * columns + wide))
    gradients = Work(tokens * (3 * columns + 2 * wide))
    project_back = Work(tokens * (3 * row + width * item + columns + (1 + streams) * wide))
    return KernelWork((project, coefficients), (gradients, project_back))


def aggregate(tokens: int, streams: int, width: int, item: int, wide: int) -> KernelWork:
    """Return the work of the weighted sum of the streams; arguments as for mappings."""
    moved = tokens * ((streams + 1) * width * item + streams * wide)
    return KernelWork((Work(moved),), (Work(moved + tokens * streams * wide),))


def write(tokens: int, streams: int, width: int, item: int, wide: int) -> KernelWork:
    """Return the work of mixing the streams and adding a sublayer's output; arguments as for mappings."""
    coefficients = streams * (streams + 1) * wide
    forward = tokens * ((2 * streams + 1) * width * item + coefficients)
    backward = tokens * ((3 * streams + 2) * width * item + 2 * coefficients)
    return KernelWork((Work(forward),), (Work(backward),))


def activation(elements: int, is_gated: bool, item: int) -> KernelWork:
    """Return the work of SwiGLU or GELU with so many elements in its output."""
    inputs = 2 if is_gated else 1
    return KernelWork((Work(elements * item * (inputs + 1)),), (Work(elements * item * (2 * inputs + 1)),))


def delta_rule(shape: RuleShape) -> KernelWork:
    """Return the work of the gated delta rule, whose sequences are not cut into parts.

    Args:
        shape: sizes of the call.
    """
    sizes = _Sizes(shape)
    return KernelWork(sizes.forward(), sizes.backward())


class _Sizes:
    """Bytes of the arrays of a call."""

    def __init__(self, shape: RuleShape) -> None:
        chunk = CHUNK_SIZE
        tokens = shape.batch * shape.length
        heads = shape.value_heads
        chunks = shape.batch * -(-shape.length // chunk)
        self.shape = shape
        self.is_kda = shape.kind == "kda"
        self.token_heads = tokens * heads
        self.per_chunk = chunks * heads
        self.chunk = chunk
        self.qk = tokens * shape.key_heads * shape.key * shape.item
        self.by_key = tokens * heads * shape.key * shape.item
        self.by_value = tokens * heads * shape.value * shape.item
        self.scalars = tokens * heads * shape.item
        self.wide_scalars = tokens * heads * shape.wide
        self.g = self.wide_scalars * (shape.key if self.is_kda else 1)
        self.pairs = chunks * heads * chunk * chunk * shape.item
        self.wide_pairs = chunks * heads * chunk * chunk * shape.wide
        self.states = shape.batch * heads * shape.key * shape.value * shape.wide
        self.chunk_states = chunks * heads * shape.key * shape.value * shape.item
        self.chunk_keys = chunks * heads * shape.key * shape.wide
        self.key_columns = shape.key * (BELOW_DIAGONAL if self.is_kda else 1)
        # What a scan reads of q, k and their decays.
        self.terms = 3 * self.by_key + self.chunk_keys if self.is_kda else 2 * self.qk + self.g

    def forward(self) -> tuple[Work, ...]:
        """Return the launches of forward."""
        products = "products_by_channel" if self.is_kda else "products_by_head"
        chunk_keys = self.chunk * self.key_columns
        inputs = self.terms + self.by_value + self.scalars + 2 * self.pairs + self.states
        return (
            self._work(products, 2 * self.qk + self.g + self.pairs + self.wide_pairs, 4 * chunk_keys),
            self._work("solve", self.wide_pairs + self.scalars + self.pairs, self.chunk**2 / 3),
            *self._decayed(),
            self._scan("scan_forward", inputs + self.by_value + self.states, 6, 4),
        )

    def backward(self) -> tuple[Work, ...]:
        """Return the launches of backward."""
        inputs = self.terms + self.by_value + self.scalars + 2 * self.pairs + self.states
        states = self._scan("scan_forward of states", inputs + self.chunk_states + self.by_value + self.states, 4, 2)
        back = self._scan("scan_backward", inputs + self.by_value + self.chunk_states + self.states, 6, 4)
        state_gradients = 2 * self.chunk_states + 3 * self.by_value + 3 * self.by_key + self.chunk_keys
        product_gradients = 5 * self.by_value + self.scalars + self.wide_pairs + 2 * self.pairs + self.wide_scalars
        return (
            *self._decayed(),
            states,
            back,
            self._work("state_gradients", state_gradients, 6 * self.shape.key * self.shape.value),
            self._work("product_gradients", product_gradients, 4 * self.chunk * self.shape.value),
            *(self._channel_gradients() if self.is_kda else self._head_gradients()),
        )

    def _decayed(self) -> tuple[Work, ...]:
        moved = 2 * self.qk + self.g + 3 * self.by_key + self.chunk_keys
        return (self._work("decayed", moved, 0),) if self.is_kda else ()

    def _channel_gradients(self) -> tuple[Work, ...]:
        slices = -(-self.shape.key // 32) * self.wide_scalars
        both = 2 * self.g  # the terms of dg before and after each token
        moved = 2 * self.qk + self.g + self.scalars + 2 * self.pairs + 5 * self.by_key + self.wide_scalars + both
        gates = self.g + both + 2 * self.chunk_keys + slices + self.g + self.scalars
        return (
            self._work("channel_gradients", moved + slices, 8 * self.chunk * self.key_columns),
            self._work("gate_gradients", gates, 0),
        )

    def _head_gradients(self) -> tuple[Work, ...]:
        matrices = 3 * self.pairs + self.wide_pairs
        inputs = 2 * self.qk + self.g + self.scalars + matrices + 3 * self.by_key + self.chunk_keys + self.wide_scalars
        heads = self._work(
            "head_gradients", inputs + 2 * self.by_key + self.g + self.scalars, 8 * self.chunk * self.shape.key
        )
        shared = self._work("sum_heads", self.by_key + self.qk, 0)
        return (heads, shared, shared) if self.shape.key_heads != self.shape.value_heads else (heads,)

    def _scan(self, name: str, moved: float, of_states: int, of_pairs: int) -> Work:
        """Return the work of a scan, with factors of the products with states and with a chunk's matrices."""
        per_token = self.shape.value * (of_states * self.shape.key + of_pairs * self.chunk)
        return self._work(f"{name}, {self.shape.kind}", moved, per_token)

    def _work(self, name: str, moved: float, flops_per_token: float) -> Work:
        """Return the work of a launch; instructions grow with the channels that it processes."""
        per_token = INSTRUCTIONS[name] * self.shape.key / COUNTED
        if name.startswith("scan"):
            per_token *= self.shape.value / COUNTED
        return Work(moved, flops_per_token * self.token_heads, per_token * self.token_heads)
