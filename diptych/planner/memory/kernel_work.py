"""Work of the Triton kernels, per operation: what a launch moves, multiplies and executes.

`diptych plan --impl triton` takes times from here instead of from the operations of PyTorch. Bytes follow from the
arguments of each launch. Instructions of the delta rule were counted in machine code
(kernels/diptych_kernels/launch_times.py), on sm_90 with default blocks, in bfloat16, with chunks of 64 tokens whose
decays are not strong; the same numbers are used for other types and chunks. Tests compare both with the kernels.

Left out are small launches (sums of partial gradients, the weight of the projection), the additional scan of sequences
that are cut into parts, and instructions of the kernels of hyper-connections and activation functions.
"""

from collections.abc import Mapping
from typing import NamedTuple

from diptych.planner.memory.rule import RuleShape


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


class Instructions(NamedTuple):
    """Warp instructions per token and value head, as a function of the channels of keys and values."""

    fixed: float = 0.0
    per_key: float = 0.0
    """For each 128 channels of keys."""
    per_value: float = 0.0
    """For each 128 channels of values."""
    per_both: float = 0.0
    """For each 128 x 128 entries of a state."""

    def of(self, key: int, value: int) -> float:
        """Return the instructions with so many channels."""
        keys = key / 128
        values = value / 128
        return self.fixed + self.per_key * keys + self.per_value * values + self.per_both * keys * values


INSTRUCTIONS: Mapping[str, Instructions] = {
    "decay_queries_and_keys": Instructions(per_key=217),
    "terms_by_channel": Instructions(61, 195),
    "terms_by_head": Instructions(50, 25),
    "invert": Instructions(94),
    "scan_forward, kda": Instructions(per_value=70, per_both=52),
    "scan_forward, gdn": Instructions(per_value=74, per_both=65),
    "scan_forward of states, kda": Instructions(per_value=53, per_both=53),
    "scan_forward of states, gdn": Instructions(per_value=60, per_both=47),
    "scan_backward, kda": Instructions(per_value=233, per_both=26),
    "scan_backward, gdn": Instructions(per_value=231, per_both=23),
    "state_gradients": Instructions(per_key=27, per_both=159),
    "product_gradients": Instructions(35, per_value=58),
    "channel_gradients": Instructions(per_key=621),
    "gate_gradients": Instructions(per_key=208),
    "head_gradients": Instructions(187, 152),
    "sum_heads": Instructions(per_key=18),
}
"""By kernel, at most; the counts may be smaller by a twentieth."""
NORM_PASSES = 5, 15
"""Passes over q and k in float32 in PyTorch's L2 norm, in forward and in backward, besides two casts if narrower."""
GATE_PASSES = 6, 10
"""Passes over g in float32 in PyTorch's gate of KDA without lower bound, likewise, besides one cast."""
SMALLEST_CHUNK = 16
"""Tokens of a tile, and of the smallest chunk of the kernels."""


def mappings(tokens: int, streams: int, width: int, item: int, wide: int) -> KernelWork:
    """Return the work of projection and coefficients of a hyper-connection.

    The backward of the projection writes the whole gradient of the streams, with those of their other uses; where
    recompute drops the streams, PyTorch adds those in another pass, which is not counted.

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


def delta_rule(shape: RuleShape, is_cut: bool = False) -> KernelWork:
    """Return the work of the gated delta rule, with the framework's norms of q and k and its gate.

    Args:
        shape: sizes of the call.
        is_cut: whether a sequence continues on the next context rank, which takes one more scan in each direction.
    """
    sizes = _Sizes(shape)
    around = sizes.around()
    kernels = sizes.kernels(is_cut)
    return KernelWork((around[0], *kernels.forward), (*kernels.backward, around[1]))


class _Sizes:
    """Bytes of the arrays of a call."""

    def __init__(self, shape: RuleShape) -> None:
        chunk = max(SMALLEST_CHUNK, shape.chunk)
        tokens = shape.batch * shape.length
        heads = shape.value_heads
        chunks = shape.batch * -(-shape.length // chunk)
        self.shape = shape
        self.is_kda = shape.kind == "kda"
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
        rows = chunk // SMALLEST_CHUNK
        self.key_columns = shape.key * ((rows + 1) / (2 * rows) if self.is_kda else 1)  # tiles below the diagonal
        # What a scan reads of q, k and their decays.
        self.steps = chunks * heads * chunk * shape.wide
        self.decays = self.chunk_keys if self.is_kda else 2 * self.steps
        # What a scan reads only to compute outputs: q and A_qk.
        self.outputs_only = (self.by_key if self.is_kda else self.qk) + self.pairs
        self.terms = (3 * self.by_key if self.is_kda else 2 * self.qk) + self.decays

    def around(self) -> tuple[Work, Work]:
        """Return the work of the framework before the first and after the last kernel."""
        item = self.shape.item
        wide = self.shape.wide
        cast = item + wide if item < wide else 0
        keys = 2 * self.qk / item
        channels = self.g / wide * self.is_kda
        forward, backward = (
            Work(keys * (wide * norm + 2 * cast) + channels * (wide * gate + cast))
            for norm, gate in zip(NORM_PASSES, GATE_PASSES, strict=True)
        )
        return forward, backward

    def kernels(self, is_cut: bool) -> KernelWork:
        """Return the launches; is_cut as in delta_rule."""
        forward = self.forward()
        backward = self.backward()
        if is_cut:
            inputs = self.terms + self.by_value + self.steps + 2 * self.pairs
            maps = self.states * (self.shape.key + self.shape.value) / self.shape.value
            columns = (self.shape.key + self.shape.value) / self.shape.value
            scan = self._scan("scan_forward of states", inputs - self.outputs_only + maps, 4, 2)
            of_maps = Work(scan.moved, scan.flops * columns, scan.instructions * columns)
            forward = (*forward, of_maps)
            backward = (self._scan("scan_backward", inputs + 2 * self.states, 6, 4), *backward)
        return KernelWork(forward, backward)

    def forward(self) -> tuple[Work, ...]:
        """Return the launches of forward."""
        name = "terms_by_channel" if self.is_kda else "terms_by_head"
        products = 2 * self.qk + self.g + self.decays + self.pairs + self.wide_pairs + 3 * self.by_key * self.is_kda
        chunk_keys = self.chunk * self.key_columns
        inputs = self.terms + self.by_value + self.steps + 2 * self.pairs + self.states
        return (
            self._work(name, products, 4 * chunk_keys),
            self._work("invert", self.wide_pairs + self.scalars + self.steps + self.pairs, self.chunk**2 / 3),
            self._scan("scan_forward", inputs + self.by_value + self.states, 6, 4),
        )

    def backward(self) -> tuple[Work, ...]:
        """Return the launches of backward."""
        inputs = self.terms + self.by_value + self.steps + 2 * self.pairs + self.states
        written = self.chunk_states + self.by_value + self.states
        states = self._scan("scan_forward of states", inputs - self.outputs_only + written, 4, 2)
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
            *[self._work("sum_heads", self.by_key + self.qk, 0)]
            * (2 * (self.shape.key_heads != self.shape.value_heads)),
        )

    def _decayed(self) -> tuple[Work, ...]:
        moved = 2 * self.qk + self.g + 3 * self.by_key + self.decays
        return (self._work("decay_queries_and_keys", moved, 0),) if self.is_kda else ()

    def _channel_gradients(self) -> tuple[Work, ...]:
        slices = -(-self.shape.key // 16) * self.wide_scalars
        both = 2 * self.g  # the terms of dg before and after each token
        moved = 2 * self.qk + self.g + self.scalars + 2 * self.pairs + 5 * self.by_key + self.wide_scalars + both
        gates = both + 2 * self.chunk_keys + slices + self.g + self.scalars
        return (
            self._work("channel_gradients", moved + slices, 8 * self.chunk * self.key_columns),
            self._work("gate_gradients", gates, 0),
        )

    def _head_gradients(self) -> tuple[Work, ...]:
        matrices = 3 * self.pairs + self.wide_pairs + self.decays
        inputs = 2 * self.qk + self.g + self.scalars + matrices + 3 * self.by_key + self.chunk_keys + self.wide_scalars
        outputs = 2 * self.by_key + self.g + self.scalars
        return (self._work("head_gradients", inputs + outputs, 8 * self.chunk * self.shape.key),)

    def _scan(self, name: str, moved: float, of_states: int, of_pairs: int) -> Work:
        """Return the work of a scan, with factors of the products with states and with a chunk's matrices."""
        per_token = self.shape.value * (of_states * self.shape.key + of_pairs * self.chunk)
        return self._work(f"{name}, {self.shape.kind}", moved, per_token)

    def _work(self, name: str, moved: float, flops_per_token: float) -> Work:
        """Return the work of a launch, which computes whole chunks."""
        per_token = INSTRUCTIONS[name].of(self.shape.key, self.shape.value)
        tokens = self.per_chunk * self.chunk
        return Work(moved, flops_per_token * tokens, per_token * tokens)
