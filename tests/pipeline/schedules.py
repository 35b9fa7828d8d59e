"""Schedules of any name and size, drawn."""

from hypothesis import strategies as st

from diptych.plans.schedule.named import NAMES
from diptych.plans.schedule.placement import INTERLEAVED_SCHEDULES, V_SCHEDULES


@st.composite
def sizes(draw, name: str, most: int = 6):
    """Arguments of build_schedule that a schedule accepts."""
    p = 1 if name == "none" else draw(st.integers(2 if name in (*INTERLEAVED_SCHEDULES, *V_SCHEDULES) else 1, most))
    if name in V_SCHEDULES:
        return name, p, draw(st.integers(1, 14)), 2
    if name == "interleaved-zb1p":
        m = draw(st.one_of(st.integers(1, 2 * p - 1), st.integers(1, 3).map(lambda rounds: rounds * p)))
        return name, p, m, draw(st.integers(2, 4))
    if name != "interleaved":
        return name, p, draw(st.integers(1, 14))
    g = draw(st.integers(p, p + 3))
    m = g * draw(st.integers(1, 3)) + draw(st.sampled_from([0, *range(p, g)]))
    return name, p, m, draw(st.integers(2, 4)), g


ANY = st.sampled_from(NAMES).flatmap(sizes)
TIMES = st.floats(0.1, 3.0)
