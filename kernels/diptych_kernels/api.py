"""Public kernel functions with validated arguments, shared by the PyTorch and JAX backends."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from diptych.plans.model.delta_rule import ChunkTables
from diptych.plans.model.implementation import MAX_KERNEL_CHANNELS, MAX_KERNEL_STREAMS
from diptych.plans.model.operations import (
    Operand,
    check_dropout_rows,
    check_epsilon,
    check_floating,
    check_gate,
    check_iterations,
    check_least_axes,
    check_matrices,
    check_rate,
    check_same_type,
    check_shape,
    check_word,
    operand_error,
)
from diptych_kernels import autodiff_rules
from diptych_kernels.autodiff_rules import Array, MappingOptions, Operation, dtype_name
from diptych_kernels.delta_rule.autodiff_rules import DELTA_RULE, BoundarySequences, DeltaRule, KernelStateExchange
from diptych_kernels.delta_rule.launch_configs import parts_of
from diptych_kernels.launch_configs import Launch, Write, wide

DIFFERENTIATED_TWICE = "differentiating twice: kernels have first derivatives only; use impl='reference'"


class Functions(ABC):
    """The kernel functions; a framework's backend implements launch, cast and differentiation.

    S is the number of residual streams and D their width. Arrays may have any strides (non-contiguous arrays are
    copied) and must be on one device. Coefficients are cast to float32, or to float64 for float64 streams. Gradients
    have the types of their arguments.

    Every function raises a ValueError that names the argument if it has an unsupported shape, type or device.
    """

    @abstractmethod
    def __call__(self, build: Callable[..., Launch], sizes: dict[str, Any], *inputs: Array) -> tuple[Array, ...]:
        """Launch the kernel that ``build(block, **sizes)`` describes."""

    @abstractmethod
    def cast(self, x: Array, dtype: str) -> Array:
        """Cast x to another type, differentiably."""

    @abstractmethod
    def apply(self, operation: Operation, static: Any, *inputs: Array | None) -> tuple[Array, ...]:
        """Return the outputs of an operation, differentiable once by its backward rule.

        Args:
            operation: the operation.
            static: its static arguments.
            *inputs: its input arrays; None for those that ``static`` excludes.
        """

    @abstractmethod
    def check_devices(self, **arrays: Array | None) -> None:
        """Reject arrays on different or unsupported devices."""

    @abstractmethod
    def cast_like(self, x: Array, residual: Array) -> Array:
        """Cast x to the type of residual if the framework autocasts."""

    @abstractmethod
    def returns_inputs(self, x: Array) -> bool:
        """Return whether x can be an output of an operation that has it as an input, without a copy."""

    @abstractmethod
    def counter(self, step: Any, like: Array) -> Array:
        """Return the training step as an integer array [1] on the device of ``like``."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        """Return zeros on the device of ``like``."""

    @abstractmethod
    def integers(self, x: Any, like: Array) -> Array:
        """Move an array of integers, possibly of numpy, to the device of ``like``."""

    @abstractmethod
    def array_kind(self, x: Any) -> str | None:
        """Return None for a dense array of the framework, else the name of the given type."""

    @abstractmethod
    def is_traced(self, x: Any) -> bool:
        """Return True if x is a number that is not known before the program runs."""

    def _operands(self, **arrays: Array | None) -> dict[str, Operand | None]:
        """Return the shapes and types of all arrays, and reject arrays of other frameworks."""
        for name, x in arrays.items():
            kind = None if x is None else self.array_kind(x)
            if kind is not None:
                raise operand_error(name, kind)
        return {name: None if x is None else Operand(tuple(x.shape), dtype_name(x)) for name, x in arrays.items()}

    def _check(self, **arrays: Array | None) -> None:
        """Check the kinds, types and devices of all arrays."""
        check_floating(**self._operands(**arrays))
        self.check_devices(**arrays)

    def sinkhorn(self, logits: Array, iterations: int = 20, last: str = "row", mhc_epsilon: float = 0.0) -> Array:
        """Compute doubly stochastic matrices by alternate normalisation of the rows and columns of exp(logits).

        Args:
            logits: logits of the matrices. [..., S, S], S <= 8
            iterations: pairs of normalisations, >= 1.
            last: axis of the last normalisation, ``"row"`` or ``"column"``.
            mhc_epsilon: added to the first normalisation, and to the sums of the others.

        Returns:
            The matrices, in the type of the logits. [..., S, S]

        Raises:
            ValueError: an argument is not supported.
        """
        self._check(logits=logits)
        check_matrices(Operand(tuple(logits.shape), dtype_name(logits)))
        check_epsilon(mhc_epsilon, "mhc_epsilon")
        static = _mapping_options("logits", logits.shape[-1], iterations, last, mhc_epsilon)
        dtype = dtype_name(logits)
        (matrices,) = self.apply(autodiff_rules.SINKHORN, static, self.cast(logits, wide(dtype)))
        return self.cast(matrices, dtype)

    def compute_mappings(
        self,
        x: Array,
        phi: Array,
        alpha: Array,
        bias: Array,
        *,
        iterations: int = 20,
        last: str = "row",
        rms_epsilon: float = 1e-5,
        mhc_epsilon: float = 0.0,
        transposed: bool = False,
    ) -> tuple[Array, Array, Array]:
        """Compute the coefficients of mHC from residual streams (arXiv 2512.24880, eqs. 5-9).

        coefficients.py has the formulas.

        Args:
            x: residual streams. [..., S, D], S <= 8
            phi: projection. [S*D, 2*S + S*S]
            alpha: gains of h_pre, h_post and h_res. [3]
            bias: bias of the coefficients. [2*S + S*S]
            iterations: pairs of normalisations of Sinkhorn, >= 1.
            last: axis of the last normalisation, ``"row"`` or ``"column"``.
            rms_epsilon: epsilon added to the mean square.
            mhc_epsilon: added to h_pre, to the first normalisation and to the sums of the others.
            transposed: the last S*S columns of phi give the transpose of h_res.

        Returns:
            h_pre [..., S], h_post [..., S] and h_res [..., S, S], in float32 (float64 for float64 streams).

        Raises:
            ValueError: an argument is not supported.
        """
        options = (iterations, last, rms_epsilon, mhc_epsilon, transposed)
        static, alpha, bias = self._mappings(x, phi, alpha, bias, *options)
        h_pre, h_post, h_res = self.apply(autodiff_rules.COMPUTE_MAPPINGS, static, x, phi, alpha, bias)
        return h_pre, h_post, h_res

    def _mappings(
        self,
        x: Array,
        phi: Array,
        alpha: Array,
        bias: Array,
        iterations: int,
        last: str,
        rms_epsilon: float,
        mhc_epsilon: float,
        transposed: bool,
    ) -> tuple[MappingOptions, Array, Array]:
        """Check the arguments of compute_mappings; return the static ones, and alpha and bias in the wide type."""
        self._check(x=x, phi=phi, alpha=alpha, bias=bias)
        check_least_axes("x", x.shape, 2)
        streams, width = x.shape[-2:]
        columns = streams * (streams + 2)
        check_epsilon(rms_epsilon, "rms_epsilon")
        check_epsilon(mhc_epsilon, "mhc_epsilon")
        static = _mapping_options("x", streams, iterations, last, mhc_epsilon)
        static = static._replace(rms_epsilon=float(rms_epsilon), transposed=bool(transposed))
        check_shape("phi", phi.shape, (streams * width, columns))
        check_shape("alpha", alpha.shape, (3,))
        check_shape("bias", bias.shape, (columns,))
        coefficients = wide(dtype_name(x))
        return static, self.cast(alpha, coefficients), self.cast(bias, coefficients)

    def read_streams(
        self,
        x: Array,
        phi: Array,
        alpha: Array,
        bias: Array,
        *,
        iterations: int = 20,
        last: str = "row",
        rms_epsilon: float = 1e-5,
        mhc_epsilon: float = 0.0,
        transposed: bool = False,
        merge_residual_gradient: bool = True,
    ) -> tuple[Array, Array, Array, Array]:
        """Compute compute_mappings and aggregate, and return x for its next use.

        Backward writes the gradient of x once, with the terms of the coefficients, of the aggregate and of the returned
        x. Separate functions write three gradients, which the framework adds. The returned x shares the memory of x
        and must not be changed in place. torch.compile adds its gradient separately.

        Args:
            x: residual streams. [..., S, D], S <= 8
            phi: projection. [S*D, 2*S + S*S]
            alpha: gains of h_pre, h_post and h_res. [3]
            bias: bias of the coefficients. [2*S + S*S]
            iterations: pairs of normalisations of Sinkhorn, >= 1.
            last: axis of the last normalisation, ``"row"`` or ``"column"``.
            rms_epsilon: epsilon added to the mean square.
            mhc_epsilon: see compute_mappings.
            transposed: see compute_mappings.
            merge_residual_gradient: True: write the gradient of x once, with that of the returned x; False: return x
                itself, and the framework adds the two gradients. Results are bitwise equal.

        Returns:
            The aggregate [..., D], h_post [..., S], h_res [..., S, S] and x [..., S, D].

        Raises:
            ValueError: an argument is not supported.
        """
        options = (iterations, last, rms_epsilon, mhc_epsilon, transposed)
        static, alpha, bias = self._mappings(x, phi, alpha, bias, *options)
        if merge_residual_gradient and self.returns_inputs(x):
            aggregated, h_post, h_res, x = self.apply(autodiff_rules.READ_WITH_RESIDUAL, static, x, phi, alpha, bias)
        else:
            aggregated, h_post, h_res = self.apply(autodiff_rules.READ, static, x, phi, alpha, bias)
        return aggregated, h_post, h_res, x

    def aggregate(self, x: Array, h_pre: Array) -> Array:
        """Compute sum_s h_pre[s] x[s], the input of a sublayer.

        Args:
            x: residual streams. [..., S, D], S <= 8
            h_pre: coefficients. [..., S]

        Returns:
            The weighted sum of the streams, in the type of x. [..., D]

        Raises:
            ValueError: an argument is not supported.
        """
        self._check(x=x, h_pre=h_pre)
        check_least_axes("x", x.shape, 2)
        _check_streams("x", x.shape[-2])
        check_shape("h_pre", h_pre.shape, x.shape[:-1])
        return self.apply(autodiff_rules.AGGREGATE, None, x, self.cast(h_pre, wide(dtype_name(x))))[0]

    def apply_h_res(self, h_res: Array, residual: Array) -> Array:
        """Compute mixed[s] = sum_j h_res[s, j] residual[j].

        Args:
            h_res: mixing matrices. [..., S, S], S <= 8
            residual: residual streams. [..., S, D]

        Returns:
            The mixed streams, in the type of residual. [..., S, D]
        """
        return self.write_streams(residual, h_res, None, None, None)

    def apply_h_post(self, output: Array, bias: Array | None, h_post: Array) -> Array:
        """Compute h_post[s] (output + bias), the contribution of a sublayer to each stream.

        Args:
            output: output of a sublayer. [..., D]
            bias: bias of the sublayer. [D]; None: no bias.
            h_post: coefficients. [..., S], S <= 8

        Returns:
            The contributions, in the type of output. [..., S, D]
        """
        return self.write_streams(None, None, output, bias, h_post)

    def write_streams(
        self,
        residual: Array | None,
        h_res: Array | None,
        output: Array | None,
        bias: Array | None,
        h_post: Array | None,
        rate: float = 0.0,
        state: Any = None,
        site: int = 0,
    ) -> Array:
        """Compute the next streams h_res residual + dropout(h_post (output + bias)) in one pass.

        This is eq. 3 of arXiv 2512.24880, with dropout.

        Args:
            residual: residual streams. [..., S, D]; None: no residual term.
            h_res: mixing matrices. [..., S, S]; None: the residual is added unmixed.
            output: output of a sublayer. [..., D]; None: only the residual term.
            bias: bias of the sublayer. [D]; None: no bias.
            h_post: coefficients. [..., S]; None if and only if output is None.
            rate: dropout probability, in [0, 1).
            state: an ops.DropoutState with rows [...]; None: no dropout.
            site: dropout site, see diptych.plans.model.philox.

        Returns:
            The next residual streams. [..., S, D]

        Raises:
            ValueError: an argument is not supported, or the combination of None and arrays has no meaning.
        """
        self._check(residual=residual, h_res=h_res, output=output, bias=bias, h_post=h_post)
        _check_given(residual, h_res, output, bias, h_post)
        check_rate(rate)
        name, array, axes = ("h_post", h_post, 1) if residual is None else ("residual", residual, 2)
        check_least_axes(name, array.shape, axes)  # pyright: ignore[reportOptionalMemberAccess]
        if output is not None:
            check_least_axes("output", output.shape, 1)
        shape = (*h_post.shape, output.shape[-1]) if residual is None else residual.shape  # pyright: ignore[reportOptionalMemberAccess]
        _check_streams("h_post" if residual is None else "residual", shape[-2])
        for name, array, expected in (
            ("h_res", h_res, (*shape[:-1], shape[-2])),
            ("output", output, (*shape[:-2], shape[-1])),
            ("bias", bias, shape[-1:]),
            ("h_post", h_post, shape[:-1]),
        ):
            if array is not None:
                check_shape(name, array.shape, expected)
        if residual is not None and output is not None:
            output = self.cast_like(output, residual)
            check_same_type("output", dtype_name(output), "residual", dtype_name(residual))
        add = "none" if residual is None else "plain" if h_res is None else "mix"
        coefficients = wide(dtype_name(residual if output is None else output))
        h_res, h_post = (None if h is None else self.cast(h, coefficients) for h in (h_res, h_post))
        write = Write(add, output is not None, bias is not None)
        rows = (None, None, None)
        if state is not None and output is not None:
            self._check_state(shape[:-2], output, state, site)
        if state is not None and rate > 0.0 and output is not None:
            write = write._replace(rate=float(rate), seed=int(state.seed), site=int(site))
            rows = (state.row_low, state.row_high, self.counter(state.step, output))
        return self.apply(autodiff_rules.WRITE, write, residual, h_res, output, bias, h_post, *rows)[0]

    def _check_state(self, shape: tuple[int, ...], output: Array, state: Any, site: Any) -> None:
        """Reject rows that do not match output, and values that launches do not support."""
        rows = {"row_low": state.row_low, "row_high": state.row_high}
        operands = self._operands(**{f"state.{name}": row for name, row in rows.items()})
        check_dropout_rows(shape, **{name.removeprefix("state."): row for name, row in operands.items() if row})
        self.check_devices(output=output, **rows)
        for name, word in (("state.seed", state.seed), ("site", site)):
            if self.is_traced(word):
                raise ValueError(
                    f"{name}: expected a number that is known when the program is traced, got a traced one; "
                    "impl='reference' takes it"
                )
            check_word(name, word)
        if not self.is_traced(state.step):
            check_word("state.step", state.step)

    def swiglu(self, x: Array) -> Array:
        """Compute SwiGLU, silu(gate) value for x = [gate | value] (arXiv 2002.05202, eq. 6).

        Args:
            x: gate and value side by side. [..., 2 F]

        Returns:
            The product, in the type of x. [..., F]

        Raises:
            ValueError: the width of x is odd, or x has an unsupported type or device.
        """
        self._check(x=x)
        check_gate(Operand(tuple(x.shape), dtype_name(x)))
        return self.apply(autodiff_rules.SWIGLU, None, x)[0]

    def gelu(self, x: Array) -> Array:
        """Compute GELU, x Phi(x), with the error function and not its tanh approximation (arXiv 1606.08415).

        Args:
            x: input. [..., F]

        Returns:
            The activation, in the type of x. [..., F]

        Raises:
            ValueError: x has an unsupported type or device.
        """
        self._check(x=x)
        check_least_axes("x", x.shape, 1)
        return self.apply(autodiff_rules.GELU, None, x)[0]

    def delta_rule(
        self,
        q: Array,
        k: Array,
        v: Array,
        g: Array,
        beta: Array,
        initial: Array | None,
        tables: ChunkTables,
        chunk_size: int,
        scale: float,
        recompute: bool = True,
        exchange: KernelStateExchange | None = None,
        boundary: BoundarySequences | None = None,
    ) -> tuple[Array, Array]:
        """Compute outputs and final states of the gated delta rule (arXiv 2412.06464; KDA: arXiv 2510.26692).

        chunk_kda and chunk_gated_delta_rule of both backends check the arguments that are not checked here. float16 is
        computed as float32, since intermediates exceed its range.

        Args:
            q: queries. [B, T, H, K], K <= 256
            k: keys. [B, T, H, K]
            v: values. [B, T, HV, V], V <= 256
            g: log decay, natural log, <= 0. [B, T, HV, K], or [B, T, HV] for one decay per head
            beta: write strengths. [B, T, HV]
            initial: initial states. [N, HV, K, V]; None: zeros
            tables: chunks and sequences of the concatenated tokens.
            chunk_size: tokens per chunk of the tables: 16, 32 or 64.
            scale: factor of the queries.
            recompute: True: save A_qk, A_kk, the inverse, beta and the decays of chunks, and recompute decayed q and k,
                states and errors in backward; False: save them all.
            exchange: exchange of states between context-parallel ranks; None: complete sequences.
            boundary: the rank's boundary sequences, given if and only if exchange is; None: complete sequences.

        Returns:
            The outputs [B, T, HV, V], in the type of v, and the final states [N, HV, K, V] in float32 (float64 for
            float64).

        Raises:
            ValueError: an array has more channels than the kernels support, or an unsupported type or device.
        """
        self._check(q=q, k=k, v=v, g=g, beta=beta, initial=initial)
        for name, x in {"q": q, "v": v}.items():
            if x.shape[-1] > MAX_KERNEL_CHANNELS:
                raise ValueError(
                    f"{name}: expected at most {MAX_KERNEL_CHANNELS} channels, got {x.shape[-1]}; "
                    "impl='reference' supports any number"
                )
        output_dtype = dtype_name(v)
        if "float16" in (dtype_name(q), dtype_name(k), output_dtype):  # states and gradients may exceed 65504
            q, k, v = (self.cast(x, "float32") for x in (q, k, v))
        dtype = wide(dtype_name(q))
        value_heads, width = v.shape[2:]
        sequences = self.integers(tables.sequences, q)
        if initial is None:
            initial = self.zeros((sequences.shape[0], value_heads, q.shape[-1], width), dtype, q)
        parts = parts_of(len(tables.chunks), len(tables.sequences), value_heads, width) if tables.known else 1
        static = DeltaRule(len(g.shape) == 4, float(scale), chunk_size, recompute, parts, exchange)
        arrays = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v, g, beta)]
        part_sequences = sequences if parts == 1 else self.integers(tables.cut(parts, chunk_size), q)
        arrays += [initial, self.integers(tables.chunks, q), sequences, part_sequences]
        if boundary is not None:
            arrays += boundary._replace(sequences=self.integers(boundary.sequences, q))
        o, final = self.apply(DELTA_RULE, static, *arrays)
        return self.cast(o, output_dtype).reshape(*v.shape), final


def _check_given(
    residual: Array | None, h_res: Array | None, output: Array | None, bias: Array | None, h_post: Array | None
) -> None:
    """Reject combinations of arguments that write nothing or leave an argument unused."""
    arrays = {"residual": residual, "h_res": h_res, "output": output, "bias": bias, "h_post": h_post}
    given = {name for name, array in arrays.items() if array is not None}
    adds = {"output", "h_post"} <= given
    mixes = {"residual", "h_res"} <= given
    if not (adds or mixes) or (not adds and given & {"output", "h_post", "bias"}):
        raise ValueError(
            "write_streams: expected residual with h_res, or output with h_post (and bias), or both; got "
            + (", ".join(name for name in arrays if name in given) or "neither")
        )
    if h_res is not None and residual is None:
        raise ValueError("h_res: expected a residual to mix, got residual=None; pass residual")


def _check_streams(name: str, streams: int) -> None:
    """Reject more residual streams than the kernels support."""
    if streams > MAX_KERNEL_STREAMS:
        raise ValueError(
            f"{name}: expected at most {MAX_KERNEL_STREAMS} residual streams, got {streams}; "
            "impl='reference' supports any number"
        )


def _mapping_options(name: str, streams: int, iterations: int, last: str, mhc_epsilon: float) -> MappingOptions:
    """Check the options of Sinkhorn and return them; ``name`` is the array with the streams."""
    check_iterations(iterations, last)
    _check_streams(name, streams)
    return MappingOptions(int(iterations), last, float(mhc_epsilon))
