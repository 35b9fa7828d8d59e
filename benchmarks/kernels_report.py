"""The tables in docs/kernels.md: resources and estimated times of every kernel, compiled ahead of time.

python -m benchmarks.kernels_report          (make kernels-report: updates them)
"""

import json
from pathlib import Path

import triton
from rich.progress import track

from diptych_kernels import aot as ahead
from diptych_kernels import autodiff_rules
from diptych_kernels.launch_configs import Block, MappingOptions, Write
from diptych_kernels.launch_times import GPUS, Counted, count
from diptych_kernels.machine_code import MachineCode, machine_code

PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"
RESULTS = Path(__file__).parent / "results"
MEASURED = "nvidia-h100-80gb-hbm3-2026-11-27.json"
"""Measured times of kernels, which the estimates are compared with; those of the delta rule have changed since."""
BEGIN = "<!-- table: python -m benchmarks.kernels_report -->\n"
BEGIN_TIMES = "<!-- table of times: python -m benchmarks.kernels_report -->\n"
BEGIN_TOTALS = "<!-- table of totals: python -m benchmarks.kernels_report -->\n"
END = "<!-- end of table -->\n"
BEGIN_DELTA = "<!-- table of the delta rule: python -m benchmarks.kernels_report -->\n"
TOKENS = 8192
STREAMS = 4
WIDTH = 4096
DTYPE = "bfloat16"
HEADS = 32
Used = dict[str, dict[int, ahead.Resources]]
MACHINE = 90
"""The compute capability whose machine code is counted."""


def recorded_launches(delta_rule: bool = False) -> dict[str, ahead.Recorded]:
    """Return the launch of every kernel at its production shape, by name."""
    if delta_rule:
        return ahead.delta_rule_production(tokens=TOKENS, heads=HEADS, dtype=DTYPE)
    return ahead.production(TOKENS, STREAMS, WIDTH, DTYPE)


def resources(delta_rule: bool = False) -> Used:
    """Return the resources of every kernel, by compute capability."""
    recorded = recorded_launches(delta_rule)
    pairs = [(name, capability) for name in recorded for capability in ahead.TARGETS]
    used: Used = {name: {} for name in recorded}
    for name, capability in track(pairs, "compiling"):
        used[name][capability] = ahead.resources(recorded[name], capability)
    return used


def codes(delta_rule: bool = False) -> dict[str, MachineCode]:
    """Return the machine code of every kernel on sm_90."""
    recorded = recorded_launches(delta_rule)
    return {name: machine_code(ahead.compile_ahead(entry, MACHINE)) for name, entry in recorded.items()}


def table(used: Used, code: dict[str, MachineCode]) -> str:
    """Return the Markdown table of the kernels of streams and activations."""
    size = f"{TOKENS} tokens of S = {STREAMS}, D = {WIDTH}, {DTYPE}"
    cells = {name: f"{entry.ideal_bytes(TOKENS):,}" for name, entry in recorded_launches().items()}
    return _table(used, code, size, "ideal bytes per token", cells, recorded_launches())


def delta_rule_table(used: Used, code: dict[str, MachineCode]) -> str:
    """Return the Markdown table of the kernels of the delta rule."""
    recorded = recorded_launches(delta_rule=True)
    count = TOKENS * HEADS
    size = f"{TOKENS} tokens of {HEADS} heads, K = V = 128, {DTYPE}, g float32"
    cells = {name: f"{entry.all_bytes() // count:,} | {entry.flops() // count:,}" for name, entry in recorded.items()}
    return _table(used, code, size, "bytes per token and head | FLOPs per token and head", cells, recorded)


def _table(
    used: Used,
    code: dict[str, MachineCode],
    size: str,
    heading: str,
    cells: dict[str, str],
    recorded: dict[str, ahead.Recorded],
) -> str:
    columns = heading.count("|") + 3
    lines = [
        f"Triton {triton.__version__}, {size}; registers per thread / spilled bytes per thread / shared bytes per "
        "program, and the share of a multiprocessor's warps that registers and shared memory allow. On "
        f"sm_{MACHINE}: instructions, those of loops, and the share of bytes moved by 16-byte accesses, among all "
        "accesses of 8 bytes or more.\n",
        f"| kernel | {heading} | warps |"
        + "".join(f" sm_{target} |" for target in ahead.TARGETS)
        + " instructions (in loops) | 16 bytes |",
        "|---|" + "---|" * (columns + 1 + len(ahead.TARGETS)),
    ]
    for name, entry in recorded.items():
        resources_of = (
            f" {use.registers} / {use.spilled} / {use.shared}, {ahead.occupancy(use, target):.0%} |"
            for target, use in ((target, used[name][target]) for target in ahead.TARGETS)
        )
        counts = f" {code[name].instructions:,} ({code[name].in_loops:,}) | {code[name].wide_share:.0%} |"
        lines.append(f"| {name} | {cells[name]} | {entry.launch.num_warps} |" + "".join(resources_of) + counts)
    return "\n".join(lines) + "\n"


def measured_launches() -> dict[str, tuple[Counted, float]]:
    """Return the counts and the measured seconds of kernels, each with the block that was measured."""
    found = {}
    for row in track(json.loads((RESULTS / MEASURED).read_text())["kernels"], "counting"):
        name = row["kernel"]
        blocks = {name.split(" (")[0].rsplit(".", 1)[1]: Block(*row["block"])}
        recorded = ahead.production(TOKENS, STREAMS, WIDTH, DTYPE, blocks=blocks)
        found[name] = count(recorded[name]), row["microseconds"] / 1e6
    return found


def times_table() -> str:
    """Return the Markdown table of estimated and measured times."""
    lines = [
        f"Triton {triton.__version__}, sizes as above, with the blocks that were the fastest on the H100.\n",
        "| kernel | warp instructions, millions | H100, estimated µs | limit | measured µs | estimated / measured "
        "| H200, estimated µs | B200, estimated µs |",
        "|---" * 8 + "|",
    ]
    for name, (counted, measured) in measured_launches().items():
        times = {gpu: counted.on(rates) for gpu, rates in GPUS.items()}
        here = times["H100"]
        lines.append(
            f"| {name} | {counted.instructions / 1e6:.1f} | {here.seconds * 1e6:.0f} | {here.limit} "
            f"| {measured * 1e6:.0f} | {here.seconds / measured:.2f} "
            f"| {times['H200'].seconds * 1e6:.0f} | {times['B200'].seconds * 1e6:.0f} |"
        )
    return "\n".join(lines) + "\n"


def totals_table() -> str:
    """Return the Markdown table of the kernels of complete operations, with the default blocks."""
    lines = [
        f"Triton {triton.__version__}, {TOKENS} tokens in one sequence, K = V = 128, {DTYPE}, default blocks; in ms.\n",
        "| operation |" + "".join(f" {gpu}, forward | {gpu}, backward |" for gpu in GPUS),
        "|---" * (1 + 2 * len(GPUS)) + "|",
    ]
    for name, passes in _operations().items():
        counts = [[count(entry) for entry in entries] for entries in passes]
        cells = [sum(each.on(gpu).seconds for each in entries) for gpu in GPUS.values() for entries in counts]
        lines.append(f"| {name} |" + "".join(f" {1e3 * cell:.2f} |" for cell in cells))
    return "\n".join(lines) + "\n"


def _operations() -> dict[str, tuple[list[ahead.Recorded], list[ahead.Recorded]]]:
    """Return the launches of the forward and backward of complete operations."""
    found = {
        f"{name}, {heads} heads": ahead.delta_rule_by_pass(per_channel, heads=heads, dtype=DTYPE, parts=1)
        for name, per_channel, heads in (("KDA", True, 64), ("KDA", True, HEADS), ("GDN", False, HEADS))
    }
    coefficients = [ahead.Shape((TOKENS, *more), "float32") for more in ((STREAMS, STREAMS), (STREAMS,))]
    x = ahead.Shape((TOKENS, STREAMS, WIDTH), DTYPE)
    columns = STREAMS * (STREAMS + 2)
    parameters = [ahead.Shape(shape, "float32") for shape in ((STREAMS * WIDTH, columns), (3,), (columns,))]
    options = MappingOptions(20, "row", rms_epsilon=1e-5)
    read = ahead.launches_by_pass(autodiff_rules.READ_WITH_RESIDUAL, options, [x, *parameters])
    write_inputs = [x, coefficients[0], ahead.Shape((TOKENS, WIDTH), DTYPE), None, coefficients[1], None, None, None]
    write = ahead.launches_by_pass(autodiff_rules.WRITE, Write("mix", post=True, bias=False), write_inputs)
    found[f"hyper-connection, {STREAMS} streams of {WIDTH}"] = ([*read[0], *write[0]], [*write[1], *read[1]])
    gated = ahead.Shape((TOKENS, 8 * WIDTH), DTYPE)
    found[f"SwiGLU, {4 * WIDTH} channels"] = ahead.launches_by_pass(autodiff_rules.SWIGLU, None, [gated])
    return found


def printed(page: str, begin: str) -> str:
    """Return the table that follows a marker in a page."""
    start = page.index(begin) + len(begin)
    return page[start : page.index(END, start)]


def main() -> None:
    """Update the tables in the page."""
    page = PAGE.read_text()
    tables = (
        (BEGIN, table(resources(), codes())),
        (BEGIN_DELTA, delta_rule_table(resources(True), codes(True))),
        (BEGIN_TIMES, times_table()),
        (BEGIN_TOTALS, totals_table()),
    )
    for begin, text in tables:
        page = page.replace(begin + printed(page, begin) + END, begin + text + END)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
