"""The report of the predicted memory of a training step."""

from rich.console import Console

from diptych.planner.budget import BudgetPlan
from diptych.planner.memory import MemoryPrediction
from diptych.planner.memory.rank_peaks import rank_peaks
from diptych.planner.memory.stages import simulate_stage
from diptych.planner.reports.console import new_table
from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import block_length, recompute_blocks, without_recompute
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.partition import get_stage_place

MIB = 2**20
SMALL_SHARE = 0.002
"""Share of the sum below which terms are added up in one row."""


def print_plan(console: Console, config: TransformerConfig, batch: int, num_microbatches: int = 1) -> None:
    """Print the recompute blocks and the memory of a training step, term by term, with and without recompute.

    Args:
        console: printed to.
        config: the model, without pipeline ranks.
        batch: sequences of a microbatch.
        num_microbatches: microbatches of a step.
    """
    blocks = recompute_blocks(config)
    console.print(f"blocks: {describe_blocks(config)}")
    if config.recompute_layout is not None:
        console.print(f"--recompute-layout {config.recompute_layout}", highlight=False, soft_wrap=True)
    plan, full = (_predict(each, batch, num_microbatches) for each in (config, without_recompute(config)))
    title = f"PyTorch, {batch} sequences of {config.seq_length} tokens"
    if config.context_parallel_size > 1:
        title += f", on one of {config.context_parallel_size} context ranks"
    columns = [full] if all(block.kind == "none" for block in blocks) else [full, plan]
    headings = ("saved for backward", "without recompute, MiB", "as planned, MiB")
    table = new_table(title, headings[: 1 + len(columns)], left=headings[:1])
    for name, *sizes in _rows(columns):
        table.add_row(name, *(f"{size / MIB:,.1f}" for size in sizes))
    table.add_section()
    for name, values in (("saved", [c.saved for c in columns]), ("peak of the step", [c.peak for c in columns])):
        table.add_row(name, *(f"{value / MIB:,.1f}" for value in values))
    console.print(table)
    if len(columns) == 2:
        console.print(
            f"saved: {plan.saved / full.saved:.3f}, peak: {plan.peak / full.peak:.3f} of the step without recompute"
        )
        if plan.peak > 1.005 * full.peak:
            console.print(_higher_peak(config, plan.peak / full.peak), style="yellow")


def _predict(config: TransformerConfig, batch: int, num_microbatches: int) -> MemoryPrediction:
    """Return what a microbatch saves on one rank, and the peak of all microbatches of a step."""
    (peak,) = rank_peaks(config, schedule_for(config, num_microbatches), batch)
    saved = simulate_stage(config, 0, batch).saved_by_name
    return MemoryPrediction(dict(saved.most_common()), sum(saved.values()), peak)


def _higher_peak(config: TransformerConfig, ratio: float) -> str:
    """Return a warning that explains why recompute raises the peak, with a remedy."""
    layers = max(len(block.layers) for block in recompute_blocks(config))
    shorter = block_length(config.num_layers, config.num_residual_streams)
    remedy = f"--mhc-recompute-layer-num {shorter}" if shorter < layers else "recomputing less, or other modules"
    return (
        f"warning: this recompute raises the peak of memory {ratio:.2f} times, because in backward all values of a "
        f"block of {layers} layers are resident at once; use {remedy}"
    )


def _rows(columns: list[MemoryPrediction]) -> list[tuple]:
    """Return rows of a name and its bytes in each column, largest first; small terms are added up."""
    rows = []
    rest = [0] * len(columns)
    for name in columns[0].saved_by_name:
        sizes = [column.saved_by_name.get(name, 0) for column in columns]
        if max(sizes) < SMALL_SHARE * columns[0].saved:
            rest = [a + b for a, b in zip(rest, sizes, strict=True)]
        else:
            rows.append((name, *sizes))
    return [*rows, ("smaller terms", *rest)]


def describe_fit(plan: BudgetPlan) -> str:
    """Describe the memory and time of the recompute that fits a budget."""
    stored = ""
    if plan.config.activation_storage is not None:
        stored = f"; layers that save in 8 bits: {plan.config.activation_storage_layers or 'all'}"
    moved = ""
    if plan.config.enable_activation_offload:
        moved = f"; layers (or their values) that move to the host: {plan.config.activation_offload_layers or 'all'}"
    work = ["recomputation", *["packing"] * bool(stored), *["waits for copies"] * bool(moved)]
    return (
        f"recompute within {plan.budget / MIB:,.1f} MiB for a rank: {plan.peak / MIB:,.1f} MiB, "
        f"{plan.seconds * 1e3:.3g} ms of {' and '.join(work)} for a microbatch (any other that is searched: at least "
        f"{plan.bound * 1e3:.3g} ms){stored}{moved}"
    )


def describe_blocks(config: TransformerConfig, stage: int = 0) -> str:
    """Describe the recompute blocks of a stage; consecutive equal blocks are joined."""
    words: list[list] = []
    for block in recompute_blocks(config, *get_stage_place(config, stage)):
        what = (
            "no recompute"
            if block.kind == "none"
            else "whole layers"
            if block.kind == "full"
            else ", ".join(sorted(block.modules))
        )
        key = (len(block.layers), what)
        if words and words[-1][0] == key:
            words[-1][1] += 1
        else:
            words.append([key, 1])
    return "; ".join(f"{count} of {layers} layer{'s' * (layers > 1)}: {what}" for (layers, what), count in words)
