"""What both backends' property tests draw: any schedule over any split of the layers."""

from typing import Any, NamedTuple

from hypothesis import strategies as st

from diptych.plans.schedule.placement import INTERLEAVED_SCHEDULES, SCHEDULES, V_SCHEDULES


class Cut(NamedTuple):
    """How a model is cut and in how many microbatches it learns."""

    settings: dict[str, Any]
    """Of TransformerConfig."""
    num_microbatches: int


@st.composite
def any_cut(draw) -> Cut:
    """Schedule, p, m, v, g, and how many layers each stage has: none, one or two."""
    name = draw(st.sampled_from([*(name for name in SCHEDULES if name != "none"), "interleaved"]))  # has most cases
    p = draw(st.integers(2, 4))
    v = draw(st.integers(2, 3)) if name in INTERLEAVED_SCHEDULES else 2 if name in V_SCHEDULES else None
    if name == "interleaved-zb1p":
        group, count = None, draw(st.sampled_from([1, p, p + 1, 2 * p]))
    elif name != "interleaved":
        group, count = None, draw(st.integers(1, 6))
    else:
        group = draw(st.integers(p, p + 1))
        count = group * draw(st.integers(1, 2)) + draw(st.sampled_from([0, *range(p, group)]))
    stages = p * (v or 1)
    layers = draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages).filter(any))
    settings = {
        "pipeline_model_parallel_size": p,
        "pipeline_schedule": name,
        "virtual_pipeline_model_parallel_size": v,
        "num_layers": sum(layers),
        "pipeline_model_parallel_layout": "E" + "|".join(map("t".__mul__, layers)) + "L",
        "microbatch_group_size_per_vp_stage": group,
        "untie_embeddings_and_output_weights": draw(st.booleans()),
    }
    return Cut(settings, count)
