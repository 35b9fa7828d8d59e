"""Launch configurations of all kernels: grid, block, warps and outputs, shared by all backends.

Each function has the name of its kernel. It takes a Block and the sizes of a call, and returns a Launch, which contains
everything that a backend needs besides the input arrays. The arguments of kernels are inputs, scalars, outputs and
constants, in this order. The number of tokens is a scalar, so that kernels are not compiled again if it changes.

Arguments that have one meaning in all functions:

    lead        sizes of the axes of tokens; their product is the number of tokens
    streams     number of residual streams, S
    width       channels of a stream or of an activation, D or F
    dtype       type of the streams or the activation; of matrices and coefficients if these are the inputs
    options     options of Sinkhorn and of the mappings
    write       static arguments of write_streams
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from diptych.plans.model.philox import dropout_threshold

TARGET_PROGRAMS = 528
"""Programs that keep a large GPU busy: four on each of 132 multiprocessors."""


class Block(NamedTuple):
    """The tuned parameters of a launch.

    Args:
        rows: tokens of a program's tile.
        columns: channels of a program's tile.
        num_warps: warps per program.
        num_stages: pipeline stages of loops.
    """

    rows: int
    columns: int
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel.

    Args:
        kernel: ``module.function`` within this package.
        grid: number of programs along each axis.
        scalars: integer arguments, between the inputs and the outputs.
        outputs: shape and type of each output.
        constants: names and values of the constexpr arguments.
        num_warps: warps per program.
        num_stages: pipeline stages of loops.
        tuned_for: power-of-two bucket of the grid, part of the key under which tuning stores the fastest block; 0: not
            part of it.
    """

    kernel: str
    grid: tuple[int, ...]
    scalars: tuple[int, ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    constants: tuple[tuple[str, int | float | str | bool], ...]
    num_warps: int
    num_stages: int
    tuned_for: int = 0

    @property
    def compiled_as(self) -> tuple:
        """The values that determine a compiled kernel, besides the types of its inputs."""
        types = tuple(dtype for _, dtype in self.outputs)
        return self.kernel, types, self.constants, self.num_warps, self.num_stages


CANDIDATES: dict[str, tuple[Block, ...]] = {
    "aggregate_forward": (Block(1, 2048), Block(1, 1024), Block(4, 256), Block(1, 4096, 8)),
    "aggregate_backward": (Block(1, 1024), Block(1, 512, 2), Block(4, 256), Block(1, 2048, 8)),
    "write_forward": (Block(1, 1024), Block(1, 2048, 8), Block(1, 512, 2), Block(1, 256, 1)),
    "write_backward": (Block(1, 512, 2), Block(1, 256, 1), Block(1, 1024), Block(1, 2048, 8)),
    "project_forward": (Block(64, 128, 8, 3), Block(64, 128, 4, 4), Block(64, 256, 8, 3), Block(64, 64, 4, 4)),
    "project_backward": (Block(64, 64, 4, 3), Block(64, 128, 4, 3), Block(64, 128, 8, 2), Block(32, 64, 4, 3)),
    "sinkhorn_forward": (Block(64, 1), Block(32, 1), Block(128, 1)),
    "sinkhorn_backward": (Block(16, 1, 1), Block(32, 1, 2), Block(64, 1)),
    "mappings_forward": (Block(64, 1), Block(32, 1), Block(128, 1)),
    "mappings_backward": (Block(16, 1, 1), Block(32, 1, 2), Block(64, 1)),
    "column_sum": (Block(16, 64), Block(8, 128), Block(32, 64)),
    "swiglu_forward": (Block(1, 2048), Block(1, 4096, 8), Block(4, 256)),
    "swiglu_backward": (Block(1, 2048), Block(1, 2048, 8), Block(4, 256)),
    "gelu_forward": (Block(1, 2048), Block(1, 4096, 8), Block(4, 256)),
    "gelu_backward": (Block(1, 1024), Block(1, 2048, 8), Block(4, 256)),
}
"""Candidate blocks by kernel, from measurements on an H100; the first is the default, which spills nothing there."""


def wide(dtype: str) -> str:
    """Return the type of coefficients and sums: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two >= n and >= least."""
    return max(least, 1 << (n - 1).bit_length())


def groups_of(tokens: int, programs: int) -> tuple[int, int]:
    """Return the number of groups of tokens for about TARGET_PROGRAMS programs, and the tokens per group.

    The tokens per group are a multiple of 128. The groups do not depend on the block, so that tuning does not change
    the order of summation of a gradient. There are at least two groups (the second may be empty), because jax-triton
    recompiles a kernel for a scalar that is 1.

    Args:
        tokens: number of tokens.
        programs: number of programs per group.
    """
    blocks = math.ceil(tokens / 128)
    per_group = math.ceil(blocks / max(1, min(blocks, math.ceil(TARGET_PROGRAMS / programs)))) * 128
    return max(2, math.ceil(tokens / max(per_group, 1))), per_group


def launch_of(
    module: str,
    builder: Callable,
    block: Block,
    grid: tuple[int, ...],
    scalars: tuple[int, ...],
    outputs: list[tuple[tuple[int, ...], str]],
    **constants: int | float | str | bool,
) -> Launch:
    """Return a launch of the kernel with the name of its builder.

    Args:
        module: module of the kernel within this package.
        builder: the function of this file (or of delta_rule/launch_configs.py) that configures the launch.
        block: tuned parameters.
        grid: number of programs along each axis.
        scalars: integer arguments of the kernel.
        outputs: shape and type of each output.
        **constants: constexpr arguments of the kernel.
    """
    kernel = f"{module}.{builder.__name__}"
    return Launch(kernel, grid, scalars, tuple(outputs), tuple(constants.items()), block.num_warps, block.num_stages)


def aggregate_forward(block: Block, lead: tuple[int, ...], streams: int, width: int, dtype: str) -> Launch:
    """Configure the launch x, h_pre -> aggregated."""
    tokens = math.prod(lead)
    columns = min(block.columns, power_of_two(width, 16))
    grid = (math.ceil(tokens / block.rows), math.ceil(width / columns))
    outputs = [((*lead, width), dtype)]
    return launch_of(
        "streams", aggregate_forward, block, grid, (tokens,), outputs, S=streams, D=width, BN=block.rows, BD=columns
    )


def aggregate_backward(
    block: Block, lead: tuple[int, ...], streams: int, width: int, dtype: str, dx: bool = True
) -> Launch:
    """Configure the launch x, h_pre, grad -> dx, dh_pre; without ``dx``, dx has shape [0]."""
    tokens = math.prod(lead)
    outputs = [((*lead, streams, width) if dx else (0,), dtype), ((*lead, streams), wide(dtype))]
    grid = (math.ceil(tokens / block.rows),)
    constants = dict(S=streams, D=width, DX=dx, **_reduction_tile(block, streams, width, dtype))
    return launch_of("streams", aggregate_backward, block, grid, (tokens,), outputs, **constants)


class Write(NamedTuple):
    """Static arguments of write_streams: the terms of the sum, and dropout.

    Args:
        add: residual term: "mix" for h_res residual, "plain" for residual, "none" for no term.
        post: add the term of the sublayer's output, h_post (output + bias).
        bias: add the bias to the output.
        rate: dropout probability of the sublayer's term.
        seed: dropout seed.
        site: dropout site; see diptych.plans.model.philox.
    """

    add: str
    post: bool
    bias: bool
    rate: float = 0.0
    seed: int = 0
    site: int = 0

    def constants(self) -> dict[str, int | float | str | bool]:
        """Return the constants of the kernel."""
        threshold = dropout_threshold(self.rate)
        return dict(ADD=self.add, POST=self.post, BIAS=self.bias, THRESHOLD=threshold, SCALE=1.0 / (1.0 - self.rate))


def write_forward(block: Block, lead: tuple[int, ...], streams: int, width: int, dtype: str, write: Write) -> Launch:
    """Configure the launch residual, h_res, output, bias, h_post, row_low, row_high, step -> next streams."""
    tokens = math.prod(lead)
    columns = min(block.columns, power_of_two(width, 16))
    grid = (math.ceil(tokens / block.rows), math.ceil(width / columns))
    outputs = [((*lead, streams, width), dtype)]
    scalars = (tokens, write.seed, write.site)
    constants = dict(S=streams, D=width, **write.constants(), BN=block.rows, BD=columns)
    return launch_of("streams", write_forward, block, grid, scalars, outputs, **constants)


def write_backward(block: Block, lead: tuple[int, ...], streams: int, width: int, dtype: str, write: Write) -> Launch:
    """Configure the launch; gradients that do not exist have shape [0].

    residual, h_res, output, bias, h_post, row_low, row_high, step, grad -> dresidual, dh_res, doutput, dh_post.
    """
    tokens = math.prod(lead)
    mix = write.add == "mix"
    outputs = [
        ((*lead, streams, width) if mix else (0,), dtype),
        ((*lead, streams, streams) if mix else (0,), wide(dtype)),
        ((*lead, width) if write.post else (0,), dtype),
        ((*lead, streams) if write.post else (0,), wide(dtype)),
    ]
    scalars = (tokens, write.seed, write.site)
    constants = dict(S=streams, D=width, **write.constants(), **_reduction_tile(block, streams, width, dtype))
    return launch_of("streams", write_backward, block, (math.ceil(tokens / block.rows),), scalars, outputs, **constants)


def _reduction_tile(block: Block, streams: int, width: int, dtype: str) -> dict[str, int]:
    """Return the tile of a program that sums over columns in registers, and the RUN of columns that a thread loads.

    Tiles are smaller for more than four streams, which have many pairs, and for float64.
    """
    columns = block.columns if streams <= 4 else block.columns // 4
    if dtype == "float64":
        columns //= 2
    per_thread = max(block.rows * columns // (32 * block.num_warps), 1)
    per_access = {"float64": 2, "float32": 4}.get(dtype, 8)  # 16 bytes
    run = math.gcd(width, min(per_thread, per_access))
    return dict(BN=block.rows, BD=min(max(columns, 16), power_of_two(width, 16)), RUN=run)


def project_forward(
    block: Block, lead: tuple[int, ...], streams: int, width: int, dtype: str, epsilon: float
) -> Launch:
    """Configure the launch x, phi -> projected, r."""
    tokens = math.prod(lead)
    row = streams * width
    columns = _coefficients(streams)
    outputs = [((*lead, columns), wide(dtype)), (lead, wide(dtype))]
    dot = _dot(block, row, columns, dtype)
    grid = (math.ceil(tokens / int(dot["BN"])),)
    constants = dict(K=row, C=columns, EPSILON=epsilon, **dot)
    return launch_of("coefficients", project_forward, block, grid, (tokens,), outputs, **constants)


def project_backward(
    block: Block,
    lead: tuple[int, ...],
    streams: int,
    width: int,
    dtype: str,
    aggregate: bool = False,
    residual_grad: bool = False,
) -> Launch:
    """Configure the launch with one partial sum of dphi per group of tokens.

    x, phi, dprojected, shrink, h_pre, grad, residual_grad -> dx, dphi.

    With ``aggregate``, dx includes h_pre grad, and with ``residual_grad`` the input of this name; see
    coefficients.project_backward.
    """
    tokens = math.prod(lead)
    row = streams * width
    columns = _coefficients(streams)
    dot = _dot(block, row, columns, dtype)
    tiles = math.ceil(row / int(dot["BK"]))
    groups, per_group = groups_of(tokens, math.ceil(row / 128))
    outputs = [((*lead, streams, width), dtype), ((groups, row, columns), wide(dtype))]
    constants = dict(S=streams, D=width, C=columns, AGGREGATE=aggregate, RESIDUAL_GRAD=residual_grad, **dot)
    return launch_of(
        "coefficients", project_backward, block, (tiles, groups), (tokens, per_group), outputs, **constants
    )


def _coefficients(streams: int) -> int:
    """Return the number of coefficients per token: h_pre, h_post and h_res."""
    return streams * (streams + 2)


def _dot(block: Block, row: int, columns: int, dtype: str) -> dict[str, int | str]:
    """Return the tile sizes (at least 16) and precision of the projection; float32 uses three tf32 products."""
    precision = {"float64": "ieee", "float32": "tf32x3"}.get(dtype, "tf32")
    padded = power_of_two(columns, 16)
    size = {"float64": 4, "float32": 2}.get(dtype, 1)  # relative to 16 bits
    fits = block.columns * 32 // max(padded, 32) // size  # limits registers to those of 16-bit tiles with 32 columns
    rows = block.rows if size == 1 and padded <= 32 else max(block.rows // 2, 16)
    return dict(PRECISION=precision, CP=padded, BN=rows, BK=min(max(fits, 16), power_of_two(row, 16)))


class MappingOptions(NamedTuple):
    """Static arguments of compute_mappings, read_streams and sinkhorn."""

    iterations: int
    """Pairs of normalisations."""
    last: str
    """Axis of the last normalisation, "row" or "column"."""
    mhc_epsilon: float = 0.0
    """Epsilon added to h_pre, to the first normalisation and to the sums of the others."""
    rms_epsilon: float = 0.0
    """Epsilon added to the mean square of the streams; not used by sinkhorn."""
    transposed: bool = False
    """The columns of the projection give the transpose of h_res; not used by sinkhorn."""

    def constants(self, streams: int) -> dict[str, int | float]:
        """Return the constants of the kernels; FIRST is an axis of the tile [BN, SP, SP], and 1 normalises columns."""
        first = 1 if self.last == "row" else 2
        return dict(ITERATIONS=self.iterations, FIRST=first, MHC_EPSILON=self.mhc_epsilon, SP=power_of_two(streams, 2))


def _matrices(block: Block, streams: int, dtype: str) -> int:
    """Return the tokens of a program: block.rows for 4 x 4 float32 matrices, fewer for larger or float64 ones."""
    size = max(16, power_of_two(streams) ** 2) * (2 if dtype == "float64" else 1)
    return max(1, block.rows * 16 // size)


def _of_matrices(
    builder: Callable,
    block: Block,
    lead: tuple[int, ...],
    streams: int,
    dtype: str,
    outputs: list[tuple[tuple[int, ...], str]],
    **constants: int | float | str | bool,
) -> Launch:
    """Configure a launch over the matrices [S, S] of all tokens."""
    tokens = math.prod(lead)
    rows = _matrices(block, streams, dtype)
    grid = (math.ceil(tokens / rows),)
    return launch_of("coefficients", builder, block, grid, (tokens,), outputs, S=streams, **constants, BN=rows)


def sinkhorn_forward(block: Block, lead: tuple[int, ...], streams: int, dtype: str, options: MappingOptions) -> Launch:
    """Configure the launch logits -> matrices."""
    outputs = [((*lead, streams, streams), dtype)]
    return _of_matrices(sinkhorn_forward, block, lead, streams, dtype, outputs, **options.constants(streams))


def sinkhorn_backward(block: Block, lead: tuple[int, ...], streams: int, dtype: str, options: MappingOptions) -> Launch:
    """Configure the launch logits, grad -> dlogits."""
    outputs = [((*lead, streams, streams), dtype)]
    return _of_matrices(sinkhorn_backward, block, lead, streams, dtype, outputs, **options.constants(streams))


def mappings_forward(block: Block, lead: tuple[int, ...], streams: int, dtype: str, options: MappingOptions) -> Launch:
    """Configure the launch projected, r, alpha, bias -> h_pre, h_post, h_res."""
    constants = dict(**options.constants(streams), TRANSPOSED=options.transposed)
    outputs = [((*lead, streams), dtype), ((*lead, streams), dtype), ((*lead, streams, streams), dtype)]
    return _of_matrices(mappings_forward, block, lead, streams, dtype, outputs, **constants)


def mappings_backward(
    block: Block, lead: tuple[int, ...], streams: int, width: int, dtype: str, options: MappingOptions
) -> Launch:
    """Configure the launch with one partial sum of dalpha and dbias per program.

    projected, r, alpha, bias, dh_pre, dh_post, dh_res -> dprojected, shrink, [dalpha | dbias].
    """
    tokens = math.prod(lead)
    rows = _matrices(block, streams, dtype)
    constants = dict(**options.constants(streams), TRANSPOSED=options.transposed)
    programs = max(2, math.ceil(tokens / rows))  # 2: see groups_of
    columns = _coefficients(streams)
    outputs = [((*lead, columns), dtype), (lead, dtype), ((programs, 3 + columns), dtype)]
    constants = dict(S=streams, D=width, **constants, BN=rows)
    return launch_of("coefficients", mappings_backward, block, (programs,), (tokens,), outputs, **constants)


def column_sum(block: Block, rows: int, groups: int, width: int, dtype: str) -> Launch:
    """Configure the launch x -> sums of its rows, group by group, in float32 or float64."""
    columns = min(block.columns, power_of_two(width, 16))
    per_group = max(2, math.ceil(rows / groups))  # 2: see groups_of
    outputs = [((groups, width), wide(dtype))]
    grid = (math.ceil(width / columns), groups)
    return launch_of("common", column_sum, block, grid, (rows, per_group), outputs, W=width, BR=block.rows, BW=columns)


def _activation(
    builder: Callable, block: Block, lead: tuple[int, ...], width: int, out_width: int, dtype: str
) -> Launch:
    """Return a launch of an activation function or its backward, elementwise over ``width`` channels."""
    tokens = math.prod(lead)
    columns = min(block.columns, power_of_two(width, 16))
    grid = (math.ceil(tokens / block.rows), math.ceil(width / columns))
    outputs = [((*lead, out_width), dtype)]
    return launch_of("activations", builder, block, grid, (tokens,), outputs, F=width, BN=block.rows, BF=columns)


def swiglu_forward(block: Block, lead: tuple[int, ...], width: int, dtype: str) -> Launch:
    """Configure the launch x [..., 2 width] -> [..., width]."""
    return _activation(swiglu_forward, block, lead, width, width, dtype)


def swiglu_backward(block: Block, lead: tuple[int, ...], width: int, dtype: str) -> Launch:
    """Configure the launch x, grad -> dx."""
    return _activation(swiglu_backward, block, lead, width, 2 * width, dtype)


def gelu_forward(block: Block, lead: tuple[int, ...], width: int, dtype: str) -> Launch:
    """Configure the launch x -> out."""
    return _activation(gelu_forward, block, lead, width, width, dtype)


def gelu_backward(block: Block, lead: tuple[int, ...], width: int, dtype: str) -> Launch:
    """Configure the launch x, grad -> dx."""
    return _activation(gelu_backward, block, lead, width, width, dtype)
