"""Inputs of the gated delta rule, drawn and made, and one way to call either backend's."""

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from tests.backends import backend_module, value_and_gradients

RULES = ("kda", "gated_delta_rule")
TOLERANCE = 1e-10


class Case(NamedTuple):
    """Arrays by the name of the argument, and the options of a call."""

    rule: str
    arrays: dict[str, np.ndarray]
    options: dict[str, Any]


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def make_case(
    rule: str = "kda",
    batch: int = 1,
    length: int = 50,
    heads: int = 2,
    group: int = 1,
    key: int = 5,
    width: int = 3,
    offsets: list[int] | None = None,
    strength: float = 1.0,
    seed: int = 0,
    state: bool = True,
    gate: bool = False,
    dtype=np.float64,
    **options,
) -> Case:
    """Random arguments; decays from about 0 to -strength, beta from 0 to 2."""
    draw = np.random.default_rng(seed)
    value_heads = heads * group
    per_head = (batch, length, value_heads)
    decay = per_head + ((key,) if rule == "kda" else ())
    g = -strength * draw.uniform(size=decay) ** draw.choice([1, 8], size=decay)
    arrays = {
        "q": unit(draw.standard_normal((batch, length, heads, key))),
        "k": unit(draw.standard_normal((batch, length, heads, key))),
        "v": draw.standard_normal((batch, length, value_heads, width)),
        "g": draw.standard_normal(decay) if gate else g,
        "beta": 2 * draw.uniform(size=per_head) * draw.choice([0, 1, 1, 1], size=per_head),
    }
    if state:
        sequences = batch if offsets is None else len(offsets) - 1
        arrays["initial_state"] = draw.standard_normal((sequences, value_heads, key, width))
    if gate:
        arrays |= {"A_log": draw.standard_normal(value_heads), "dt_bias": draw.standard_normal(value_heads * key)}
        options |= {"use_gate_in_kernel": True}
    if offsets is not None:
        arrays["cu_seqlens"] = np.array(offsets, np.int32)
    return Case(rule, {n: x if n == "cu_seqlens" else x.astype(dtype) for n, x in arrays.items()}, options)


def run(backend: str, form: str, case: Case, seed: int = 0, **more) -> list[np.ndarray]:
    """Outputs, final states, and gradients of every argument, under random cotangents."""
    function = getattr(backend_module(backend, "delta_rule"), f"{form}_{case.rule}")
    names = list(case.arrays)

    def call(*values):
        return function(**dict(zip(names, values, strict=True)), output_final_state=True, **case.options, **more)

    outputs, gradients = value_and_gradients(backend, call, list(case.arrays.values()), seed)
    return [*outputs, *gradients]


@st.composite
def cases(draw) -> tuple[Case, list[str]]:
    """A case, and what is hard about it."""
    rule, gate = draw(st.sampled_from(RULES)), False
    sizes = st.integers(1, 9)
    length = draw(st.one_of(st.integers(1, 40), st.integers(41, 300)))
    offsets = None
    if draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, length), max_size=6))
        offsets = [0, *sorted(inner), length]
    if rule == "kda":
        gate = draw(st.booleans())
    options: dict[str, Any] = {}
    if gate and draw(st.booleans()):
        options["lower_bound"] = draw(st.sampled_from([-5, -0.5]))
    if draw(st.booleans()):
        options["use_qk_l2norm_in_kernel"] = True
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([1.0, -0.3]))
    strength = draw(st.sampled_from([0.0, 0.01, 1.0, 50.0]))
    batch = 1 if offsets else draw(st.integers(1, 3))
    group = draw(st.integers(1, 3))
    hard = {
        "an empty sequence": offsets is not None and len(set(offsets)) < len(offsets),
        "no decay": strength == 0 and not gate,
        "strong decay": strength == 50 and not gate,
        "shared heads": group > 1,
        "a gate": gate,
    }
    case = make_case(
        rule,
        batch,
        length,
        draw(st.integers(1, 2)),
        group,
        draw(sizes),
        draw(sizes),
        offsets,
        strength,
        draw(st.integers(0, 99)),
        draw(st.booleans()),
        gate,
        **options,
    )
    return case, [name for name, is_there in hard.items() if is_there]
