"""Which layers a pipeline stage builds.

Stages hold the layers in model order. Consecutive stages lie on consecutive ranks and begin again with the first, or
with the schedules of placement ``v`` turn back at the last; diptych.plans.schedule.placement has both.

Layers are split evenly unless the configuration says otherwise: another number for the first or last rank, the
embedding or the loss counted as a layer, or a layout that writes every stage out.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from diptych.plans.schedule.placement import StagePlace, place_of, placement_of, stage_at

if TYPE_CHECKING:
    from diptych.plans.config import TransformerConfig

MAX_LAYOUT_LENGTH = 10_000
"""Characters of a layout written out."""


MESH_AXES = ("dp", "cp", "pp")
"""Replicas, parts of the sequences, stages. Global ranks count through a pipeline before they come to the next part,
and through all parts before they come to the next replica: rank = (dp_rank * cp_size + cp_rank) * pp_size + pp_rank."""


def mesh_shape(config: "TransformerConfig", count: int) -> tuple[int, int, int]:
    """Ranks along each of MESH_AXES, of ``count`` that a replica's number divides."""
    return (
        count // config.model_parallel_size,
        config.context_parallel_size,
        config.pipeline_model_parallel_size,
    )


def get_num_layers_to_build(
    config: "TransformerConfig", vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Number of layers of one stage.

    Args:
        config: the whole model.
        vp_stage: index of the virtual stage within its rank; None: 0.
        pp_rank: pipeline rank; None: 0.

    Raises:
        ValueError: no such stage.
    """
    return layers_by_stage(config)[get_stage(config, vp_stage, pp_rank)]


def get_transformer_layer_offset(
    config: "TransformerConfig", vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Global number, from 0, of a stage's first layer. Arguments and errors as above."""
    return sum(layers_by_stage(config)[: get_stage(config, vp_stage, pp_rank)])


def get_stage(config: "TransformerConfig", vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Global number of a stage. Arguments and errors as above."""
    for name, value, size in (
        ("vp_stage", vp_stage, config.virtual_pipeline_model_parallel_size or 1),
        ("pp_rank", pp_rank, config.pipeline_model_parallel_size),
    ):
        if not 0 <= (value or 0) < size:
            raise ValueError(f"{name}: expected 0 <= {name} < {size}, got {value}")
    place = StagePlace(vp_stage or 0, pp_rank or 0)
    return stage_at(place, config.pipeline_model_parallel_size, placement_of(config))


def get_stage_place(config: "TransformerConfig", stage: int) -> StagePlace:
    """Virtual stage and rank of a stage: the inverse of get_stage."""
    return place_of(stage, config.pipeline_model_parallel_size, placement_of(config))


def is_pipeline_first_stage(
    config: "TransformerConfig", vp_stage: int | None = None, pp_rank: int | None = None
) -> bool:
    """Whether a stage holds the embedding. Arguments and errors as above."""
    return get_stage(config, vp_stage, pp_rank) == 0


def is_pipeline_last_stage(
    config: "TransformerConfig", vp_stage: int | None = None, pp_rank: int | None = None
) -> bool:
    """Whether a stage holds final norm, head and loss. Arguments and errors as above."""
    return get_stage(config, vp_stage, pp_rank) == num_stages(config) - 1


def num_stages(config: "TransformerConfig") -> int:
    """Pipeline ranks times virtual stages per rank."""
    return config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)


def layers_by_stage(config: "TransformerConfig") -> tuple[int, ...]:
    """Number of layers of every stage, in model order; their sum is num_layers.

    Raises:
        ValueError: the options do not add up; the message names the one to change.
    """
    if config.pipeline_schedule_file is not None:  # what lies there may change
        return _layers_by_stage(config)
    return _layers_of_split(_Split(*(getattr(config, name) for name in _Split._fields)))


class _Split(NamedTuple):
    """All of a configuration that says how many layers each stage has."""

    num_layers: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    pipeline_model_parallel_layout: str | None
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    pipeline_schedule: str | None
    pipeline_schedule_file: None = None


@lru_cache(maxsize=512)
def _layers_of_split(split: _Split) -> tuple[int, ...]:
    """Planning asks for the same ones many thousand times."""
    return _layers_by_stage(split)


def _layers_by_stage(config: Any) -> tuple[int, ...]:
    if config.pipeline_model_parallel_layout is not None:
        return _layers_of_layout(config, config.pipeline_model_parallel_layout)
    p, v = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    embedding, loss = config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split
    by_rank = _units_by_rank(config, config.num_layers + embedding + loss)
    by_stage = [by_rank[get_stage_place(config, stage).pp_rank] // v for stage in range(p * v)]
    by_stage[0] -= embedding
    by_stage[p * v - 1] -= loss
    if min(by_stage) < 0:  # one stage holds embedding and loss, and was given a single layer for both
        raise ValueError(f"num_layers: expected layers for all {p * v} stages, got {config.num_layers}")
    return tuple(by_stage)


def undivided(config: "TransformerConfig") -> "TransformerConfig":
    """The same model on one rank."""
    return replace(
        config,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_model_parallel_layout=None,
        pipeline_schedule=None,
        pipeline_schedule_file=None,
        microbatch_group_size_per_vp_stage=None,
        context_parallel_size=1,
    )


def model_parallel_words(config: "TransformerConfig") -> str:
    """The settings that say how many ranks one replica takes, for messages: their product is model_parallel_size."""
    names = ("context_parallel_size", "pipeline_model_parallel_size")
    return " * ".join(name for name in names if getattr(config, name) > 1) or names[-1]


def check_stage_ends(
    config: "TransformerConfig", pre_process: bool, post_process: bool, vp_stage: int | None, pp_rank: int | None
) -> None:
    """Refuse an embedding or a head in the middle of the model.

    Raises:
        ValueError: pre_process on a stage that is not the first, or post_process on one that is not the last.
    """
    stage, last = get_stage(config, vp_stage, pp_rank), num_stages(config) - 1
    for name, wanted, place in (("pre_process", pre_process, 0), ("post_process", post_process, last)):
        if wanted and stage != place:
            raise ValueError(
                f"{name}: expected False on stage {stage} of {last + 1} (only stage {place} has that end), got True; "
                "give vp_stage and pp_rank, or a configuration without pipeline stages"
            )


def _units_by_rank(config: "TransformerConfig", total: int) -> list[int]:
    """Layers of every rank, embedding and loss among them where they count as one."""
    p, v = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    given = {
        rank: (name, count)
        for rank, name, count in (
            (0, "num_layers_in_first_pipeline_stage", config.num_layers_in_first_pipeline_stage),
            (p - 1, "num_layers_in_last_pipeline_stage", config.num_layers_in_last_pipeline_stage),
        )
        if count is not None
    }
    for name, count in given.values():
        if count % v:
            raise ValueError(f"{name}: expected a multiple of the {v} virtual stages of a rank, got {count}")
    left, ranks = total - sum(count for _, count in given.values()), p - len(given)
    if (ranks == 0 and left != 0) or left < 0 or (ranks and left % (ranks * v)):
        told = "".join(f", {name}={count}" for name, count in given.values())
        counted = " (embedding and loss counted as asked)" if total != config.num_layers else ""
        raise ValueError(
            f"num_layers: expected layers{counted} that divide evenly over {ranks} pipeline ranks with {v} stages each"
            f"{told}, got {left} of {total} left for them; change "
            "num_layers, or write the stages out as pipeline_model_parallel_layout"
        )
    return [given[rank][1] if rank in given else left // ranks for rank in range(p)]


def _layers_of_layout(config: "TransformerConfig", layout: str) -> tuple[int, ...]:
    """Layers by stage of a layout such as ``E t*3 | (tt|)*2 t L``.

    Stages are separated by ``|``; E is the embedding, t a layer, L the loss; ``*n`` repeats a letter or a group in
    parentheses; blanks and commas say nothing.
    """
    stages = _written_out(layout).split("|")
    whole = "".join(stages)
    for wrong, expected, got in (
        (len(stages) != num_stages(config), f"{num_stages(config)} stages", f"{len(stages)}"),
        (not re.fullmatch("Et*L", whole), "E before all layers and L after them, once each", f"{'|'.join(stages)!r}"),
        (whole.count("t") != config.num_layers, f"num_layers={config.num_layers} layers", f"{whole.count('t')}"),
        (not stages[0].startswith("E"), "E in the first stage", f"{stages[0]!r}"),
        (not stages[-1].endswith("L"), "L in the last stage", f"{stages[-1]!r}"),
    ):
        if wrong:
            raise ValueError(f"pipeline_model_parallel_layout: expected {expected}, got {got} in {layout!r}")
    return tuple(stage.count("t") for stage in stages)


def _written_out(layout: str) -> str:
    """A layout without repetitions, groups, blanks and commas."""
    text = re.sub(r"[\s,]", "", layout)
    while (found := re.search(r"(?:\(([^()]*)\)|([EtL|]))\*(\d+)|\(([^()]*)\)", text)) is not None:
        grouped, letter, times, plain = found.groups()
        content, times = plain if plain is not None else grouped or letter or "", int(times or 1)
        if len(text) + len(content) * times > MAX_LAYOUT_LENGTH:
            raise ValueError(
                f"pipeline_model_parallel_layout: expected at most {MAX_LAYOUT_LENGTH:,} letters written out, got "
                f"{layout!r}"
            )
        text = text[: found.start()] + content * times + text[found.end() :]
    if unknown := re.search(r"[^EtL|]", text):
        remedy = "; there are no multi-token-prediction layers here" if unknown[0] == "m" else ""
        raise ValueError(
            f"pipeline_model_parallel_layout: expected E, t, L, |, (...) and *n, got {unknown[0]!r} in "
            f"{layout!r}{remedy}"
        )
    return text
