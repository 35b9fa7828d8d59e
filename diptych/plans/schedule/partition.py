"""Partition of the layers into pipeline stages.

Stages hold the layers in model order. Consecutive stages are placed on consecutive ranks and start again at the first
rank, or with the schedules of placement ``v`` turn back at the last rank; see diptych.plans.schedule.placement.

Layers are split evenly unless the configuration sets another number for the first or last rank, counts the embedding
or the loss as a layer, or has a layout that lists every stage.
"""

import re
from functools import lru_cache
from typing import NamedTuple, Protocol

from diptych.plans.schedule.placement import Placement, StagePlace, place_of, stage_at

MAX_LAYOUT_LENGTH = 10_000
"""Maximum number of characters of a layout without repetitions."""


class PipelineSplit(NamedTuple):
    """The settings that decide how many layers each stage has, and on which rank it is placed."""

    num_layers: int
    pp_size: int
    stages_per_rank: int
    placement: Placement
    layout: str | None
    """pipeline_model_parallel_layout."""
    first_rank_layers: int | None
    """num_layers_in_first_pipeline_stage."""
    last_rank_layers: int | None
    """num_layers_in_last_pipeline_stage."""
    counts_embedding: bool
    """account_for_embedding_in_pipeline_split."""
    counts_loss: bool
    """account_for_loss_in_pipeline_split."""


class Divided(Protocol):
    """A configuration with settings of a partition."""

    @property
    def pipeline_split(self) -> PipelineSplit:
        """Settings of the partition."""
        ...


def get_num_layers_to_build(config: Divided, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Return the number of layers of one stage.

    Args:
        config: the whole model.
        vp_stage: index of the virtual stage within its rank; None: 0.
        pp_rank: pipeline rank; None: 0.

    Raises:
        ValueError: the stage does not exist.
    """
    return layers_by_stage(config)[get_stage(config, vp_stage, pp_rank)]


def get_transformer_layer_offset(config: Divided, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Return the global number, from 0, of a stage's first layer; see get_num_layers_to_build."""
    return sum(layers_by_stage(config)[: get_stage(config, vp_stage, pp_rank)])


def get_stage(config: Divided, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Return the global number of a stage; see get_num_layers_to_build.

    Raises:
        ValueError: the stage does not exist.
    """
    for name, value, size in (
        ("vp_stage", vp_stage, config.pipeline_split.stages_per_rank),
        ("pp_rank", pp_rank, config.pipeline_split.pp_size),
    ):
        if not 0 <= (value or 0) < size:
            raise ValueError(f"{name}: expected 0 <= {name} < {size}, got {value}")
    place = StagePlace(vp_stage or 0, pp_rank or 0)
    return stage_at(place, config.pipeline_split.pp_size, config.pipeline_split.placement)


def get_stage_place(config: Divided, stage: int) -> StagePlace:
    """Return the virtual stage and rank of a stage: the inverse of get_stage."""
    return place_of(stage, config.pipeline_split.pp_size, config.pipeline_split.placement)


def is_pipeline_first_stage(config: Divided, vp_stage: int | None = None, pp_rank: int | None = None) -> bool:
    """Return True if a stage holds the embedding; see get_num_layers_to_build."""
    return get_stage(config, vp_stage, pp_rank) == 0


def is_pipeline_last_stage(config: Divided, vp_stage: int | None = None, pp_rank: int | None = None) -> bool:
    """Return True if a stage holds final norm, head and loss; see get_num_layers_to_build."""
    return get_stage(config, vp_stage, pp_rank) == num_stages(config) - 1


def num_stages(config: Divided) -> int:
    """Return the number of stages: pipeline ranks times virtual stages per rank."""
    return config.pipeline_split.pp_size * config.pipeline_split.stages_per_rank


def layers_by_stage(config: Divided) -> tuple[int, ...]:
    """Return the number of layers of every stage, in model order; their sum is num_layers.

    Raises:
        ValueError: the settings contradict each other; the message names the one to change.
    """
    return layers_of_split(config.pipeline_split)


@lru_cache(maxsize=512)  # the planner reads the same partitions thousands of times
def layers_of_split(split: PipelineSplit) -> tuple[int, ...]:
    """Return the number of layers of every stage; see layers_by_stage."""
    if split.layout is not None:
        return _layers_of_layout(split, split.layout)
    stages = split.pp_size * split.stages_per_rank
    by_rank = _units_by_rank(split, split.num_layers + split.counts_embedding + split.counts_loss)
    places = [place_of(stage, split.pp_size, split.placement) for stage in range(stages)]
    by_stage = [by_rank[place.pp_rank] // split.stages_per_rank for place in places]
    by_stage[0] -= split.counts_embedding
    by_stage[-1] -= split.counts_loss
    if min(by_stage) < 0:  # one stage holds embedding and loss, which count as two, but has a single unit
        raise ValueError(f"num_layers: expected layers for all {stages} stages, got {split.num_layers}")
    return tuple(by_stage)


def check_stage_ends(
    config: Divided, pre_process: bool, post_process: bool, vp_stage: int | None, pp_rank: int | None
) -> None:
    """Reject an embedding or a head in the middle of the model.

    Raises:
        ValueError: pre_process on a stage that is not the first, or post_process on one that is not the last.
    """
    stage = get_stage(config, vp_stage, pp_rank)
    last = num_stages(config) - 1
    for name, wanted, place in (("pre_process", pre_process, 0), ("post_process", post_process, last)):
        if wanted and stage != place:
            raise ValueError(
                f"{name}: expected False on stage {stage} of {last + 1} (only stage {place} has that end), got True; "
                "give vp_stage and pp_rank, or a configuration without pipeline stages"
            )


def _units_by_rank(split: PipelineSplit, total: int) -> list[int]:
    """Return the layers of every rank, including embedding and loss if they count as layers."""
    p = split.pp_size
    v = split.stages_per_rank
    given = {
        rank: (name, count)
        for rank, name, count in (
            (0, "num_layers_in_first_pipeline_stage", split.first_rank_layers),
            (p - 1, "num_layers_in_last_pipeline_stage", split.last_rank_layers),
        )
        if count is not None
    }
    for name, count in given.values():
        if count % v:
            raise ValueError(f"{name}: expected a multiple of the {v} virtual stages of a rank, got {count}")
    left = total - sum(count for _, count in given.values())
    ranks = p - len(given)
    if (ranks == 0 and left != 0) or left < 0 or (ranks and left % (ranks * v)):
        counts_given = "".join(f", {name}={count}" for name, count in given.values())
        counted = " (with embedding or loss counted)" if total != split.num_layers else ""
        raise ValueError(
            f"num_layers: expected layers{counted} that divide evenly over {ranks} pipeline ranks with {v} stages each"
            f"{counts_given}, got {f'{left} of {total} left for them' if given else total}; choose another number of "
            "ranks or layers, or list the stages in pipeline_model_parallel_layout"
        )
    return [given[rank][1] if rank in given else left // ranks for rank in range(p)]


def _layers_of_layout(split: PipelineSplit, layout: str) -> tuple[int, ...]:
    """Return the number of layers of every stage of a layout such as ``E t*3 | (tt|)*2 t L``.

    Stages are separated by ``|``; E is the embedding, t a layer, L the loss; ``*n`` repeats a letter or a group in
    parentheses; blanks and commas are ignored.
    """
    stages = _expand(layout).split("|")
    letters = "".join(stages)
    for wrong, expected, got in (
        (
            len(stages) != split.pp_size * split.stages_per_rank,
            f"{split.pp_size * split.stages_per_rank} stages",
            f"{len(stages)}",
        ),
        (not re.fullmatch("Et*L", letters), "E before all layers and L after them, once each", f"{'|'.join(stages)!r}"),
        (letters.count("t") != split.num_layers, f"num_layers={split.num_layers} layers", f"{letters.count('t')}"),
        (not stages[0].startswith("E"), "E in the first stage", f"{stages[0]!r}"),
        (not stages[-1].endswith("L"), "L in the last stage", f"{stages[-1]!r}"),
    ):
        if wrong:
            raise ValueError(f"pipeline_model_parallel_layout: expected {expected}, got {got} in {layout!r}")
    return tuple(stage.count("t") for stage in stages)


def _expand(layout: str) -> str:
    """Return a layout with repetitions and groups expanded, without blanks and commas."""
    text = re.sub(r"[\s,]", "", layout)
    while (found := re.search(r"(?:\(([^()]*)\)|([EtL|]))\*(\d+)|\(([^()]*)\)", text)) is not None:
        grouped, letter, times, plain = found.groups()
        content = plain if plain is not None else grouped or letter or ""
        times = int(times or 1)
        if len(text) + len(content) * times > MAX_LAYOUT_LENGTH:
            raise ValueError(
                f"pipeline_model_parallel_layout: expected at most {MAX_LAYOUT_LENGTH:,} letters without repetitions, "
                f"got {layout!r}"
            )
        text = text[: found.start()] + content * times + text[found.end() :]
    if unknown := re.search(r"[^EtL|]", text):
        remedy = "; multi-token-prediction layers are not implemented" if unknown[0] == "m" else ""
        raise ValueError(
            f"pipeline_model_parallel_layout: expected E, t, L, |, (...) and *n, got {unknown[0]!r} in "
            f"{layout!r}{remedy}"
        )
    return text
