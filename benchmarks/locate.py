"""Bugs that locate attributes to the right submodule, and bugs that the usual tolerances accept.

    python -m benchmarks.locate              (make bench NAME=locate)

1. Bugs: each one is put into a submodule of one side of a pair of equal models, and `locate` searches for it. The
   table shows which tolerances accept the outputs in float32. A bug only in gradients does not change the outputs.
2. False alarms: the pairs without bugs, with other parameters and inputs for each seed, compared in three dtypes.
3. A model of 24 layers of width 256: seconds and peak memory of one process.

Arguments are parts to run: bugs, seeds, deep; without any, all of them. A number of seeds may follow: ``seeds 10``.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # models are small, and compiled more than run

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from benchmarks.mutations.cases import Bug, Case, put_in
from benchmarks.mutations.deep import DEEP_BUGS
from benchmarks.mutations.registry import CASES
from parity import locate
from parity.figures import FAILING, INK, JAX, draw_tolerance, new_figure, use_style
from parity.functions import Report
from parity.implementations import make_inputs
from parity.location import BACKWARD, Location
from parity.modules import pair_of_modules
from parity.pytrees import DTYPES, widened
from parity.report import environment

RESULT = Path("benchmarks/results/locate.json")
FIGURE = Path("docs/images/locate.png")
REQUIRED = 0.95
"""Share of the bugs that locate has to attribute to the right submodule."""
SEEDS = 100
DEEP_SECONDS = 120.0
DEEP_BYTES = 4 * 2**30
SEED = 1
"""Seed of the models with bugs."""


def _divergence(first: np.ndarray, second: np.ndarray) -> float:
    """Return the largest KL divergence of the softmax of the last axis."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    logs = [x - x.max(-1, keepdims=True) for x in (first, second)]
    logs = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in logs]
    return float(np.max((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)))


def _assert_close(first: np.ndarray, second: np.ndarray) -> bool:
    try:
        torch.testing.assert_close(torch.from_numpy(first), torch.from_numpy(second))
    except AssertionError:
        return False
    return True


TOLERANCES: dict[str, Callable[[np.ndarray, np.ndarray], bool]] = {
    "0.05": lambda a, b: float(np.abs(a - b).max()) <= 5e-2,
    "0.125": lambda a, b: float(np.abs(a - b).max()) <= 0.125,
    "KL 0.1": lambda a, b: _divergence(a, b) <= 0.1,
    "numpy": lambda a, b: bool(np.allclose(a, b)),
    "torch": _assert_close,
}
"""Usual tolerances of logits: True if they accept a pair of outputs."""


def outputs_in_float32(case: Case, bug: Bug | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs of both models in float32."""
    torch_model, jax_model, inputs = case.build(seed)
    names = case.names(torch_model)
    if bug is not None:
        put_in(bug, case, torch_model, jax_model)
    pair = pair_of_modules(torch_model, jax_model, inputs, names, case.ignore)
    arrays = {name: widened(array) for name, array in pair.call.arrays.items()}
    ours, theirs = pair.values(pair.torch.parameters, arrays)
    runs = pair.torch.run(ours, "float32", None), pair.jax.run(theirs, "float32", None)
    found = [np.ascontiguousarray(run.outputs["output"], np.float32) for run in runs]
    return found[0], found[1]


def search(case: Case, bug: Bug, seed: int) -> Location:
    """Return the location that locate finds in a pair of models with a bug."""
    torch_model, jax_model, inputs = case.build(seed)
    names = case.names(torch_model)
    put_in(bug, case, torch_model, jax_model)
    return locate(torch_model, jax_model, inputs, names=names, ignore=case.ignore, seed=seed)


def is_right(bug: Bug, location: Location) -> bool:
    """Return True if a location is the bug's submodule and direction."""
    found = None if location.point is None else location.point.path
    return found == bug.module and (location.direction == BACKWARD) == bug.gradients_only


def measure_bugs() -> list[dict[str, Any]]:
    """Return a row for each bug, and print it."""
    rows = []
    print(f"| pair | bug | side | submodule | located | seconds | difference | {' | '.join(TOLERANCES)} |")
    print("|---|---|---|---|---|---|---|" + "---|" * len(TOLERANCES))
    for case, bugs in CASES.values():
        for bug in bugs:
            start = time.perf_counter()
            location = search(case, bug, SEED)
            seconds = time.perf_counter() - start
            first, second = outputs_in_float32(case, bug, SEED)
            row = {
                "pair": case.name,
                "bug": bug.name,
                "side": bug.side,
                "module": bug.module,
                "located": None if location.point is None else location.point.path,
                "direction": location.direction,
                "gradients_only": bug.gradients_only,
                "between": location.between,
                "is_right": is_right(bug, location),
                "seconds": seconds,
                "difference": float(np.abs(first - second).max()),
                "scale": float(np.abs(first).max()),
                "accepted": {name: accepts(first, second) for name, accepts in TOLERANCES.items()},
                "notes": location.notes,
            }
            rows.append(row)
            jax.clear_caches()
            print(_line(row), flush=True)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    located = "yes" if row["is_right"] else f"NO: {row['located']}"
    direction = " (gradients only)" if row["gradients_only"] else ""
    cells = [row["pair"], row["bug"] + direction, row["side"], row["module"] or "the whole model", located]
    cells += [f"{row['seconds']:.0f}", f"{row['difference']:.1e}"]
    cells += ["accepts" if accepts else "" for accepts in row["accepted"].values()]
    return f"| {' | '.join(cells)} |"


def compare_with_seeds(case: Case, seeds: int) -> tuple[int, list[dict[str, Any]]]:
    """Compare a pair without bugs, with parameters, inputs and cotangents from each seed.

    The comparison is that of compare_modules, which compiles the JAX model for each call. Here the model is compiled
    once, and only the values change.

    Returns:
        The number of comparisons, and those that differ by more than rounding.
    """
    torch_model, jax_model, inputs = case.build(0)
    pair = pair_of_modules(torch_model, jax_model, inputs, case.names(torch_model), case.ignore)
    count = 0
    alarms = []
    for seed in range(seeds):
        other, _, inputs = case.build(seed)
        values = {**dict(other.named_parameters()), **dict(other.named_buffers())}
        pair.torch.parameters = {name: values[name].detach().double().numpy() for name in pair.torch.parameters}
        pair.call = make_inputs(inputs)
        report: Report = pair.compare([*DTYPES], gradients=True, seed=seed)
        count += len(report.rows)
        alarms += [
            {"pair": case.name, "seed": seed, "row": str(row), "excess": row.difference.excess}
            for row in report.different
        ]
        if (seed + 1) % 10 == 0:
            print(f"    {case.name}: {seed + 1} seeds, {count} comparisons, {len(alarms)} alarms", flush=True)
    return count, alarms


def measure_seeds(seeds: int) -> dict[str, Any]:
    """Return the numbers of comparisons and the false alarms of all pairs."""
    found: dict[str, Any] = {"seeds": seeds, "comparisons": {}, "alarms": []}
    for case, _ in CASES.values():
        count, alarms = compare_with_seeds(case, seeds)
        found["comparisons"][case.name] = count
        found["alarms"] += alarms
        jax.clear_caches()
    return found


def measure_deep() -> list[dict[str, Any]]:
    """Return time and memory of locate in the deep model, each bug in a process of its own."""
    rows = []
    for direction in DEEP_BUGS:
        command = [sys.executable, "-m", "benchmarks.mutations.deep", direction]
        environ = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        row = rows[-1]
        print(
            f"24 layers of width 256, {row['bug']} in {row['module']}: located {row['located']} in "
            f"{row['seconds']:.0f} s ({row['cpu_seconds']:.0f} s of CPU), peak {row['peak_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the difference of the outputs in float32 by bug, and the tolerances."""
    use_style()
    figure, (axis,) = new_figure(height=4.6)
    figure.set_size_inches(11.0, 4.8)
    ordered = sorted(rows, key=lambda row: row["difference"])
    for kind, color, marker in (("outputs", FAILING, "s"), ("gradients only", JAX, "o")):
        places = [n for n, row in enumerate(ordered) if row["gradients_only"] == (kind != "outputs")]
        sizes = [max(1e-8, ordered[n]["difference"]) for n in places]
        axis.plot(places, sizes, marker, color=color, markersize=5, label=f"bug in {kind}")
    draw_tolerance(axis, 0.125, "tolerances 0.125 and 0.05")
    draw_tolerance(axis, 5e-2, "")
    draw_tolerance(axis, 1.3e-5, "defaults of torch.testing, numpy: about 1e-5 for outputs near 1")
    axis.set(
        yscale="log",
        xlabel="bugs, ordered by the difference of outputs in float32",
        ylabel="largest difference of outputs",
    )
    axis.set_xticks(range(len(ordered)), [row["bug"] for row in ordered], rotation=90, fontsize=6, color=INK)
    axis.legend(loc="upper left")
    figure.savefig(path, dpi=110)


def summary(rows: list[dict[str, Any]]) -> str:
    """Return how many bugs are located, and how many each tolerance accepts."""
    right = sum(row["is_right"] for row in rows)
    accepted = ", ".join(f"{name} {sum(row['accepted'][name] for row in rows)}" for name in TOLERANCES)
    seconds = sorted(row["seconds"] for row in rows)[len(rows) // 2]
    pairs = len({row["pair"] for row in rows})
    located = f"{right} of {len(rows)} bugs in {pairs} pairs are located ({right / len(rows):.0%}), in {seconds:.0f} s"
    return f"{located} (median). Bugs that a tolerance accepts: {accepted}."


def main(arguments: list[str]) -> None:
    """Measure, print, and write JSON and figure; raise an AssertionError if a requirement is not met."""
    torch.set_num_threads(1)
    numbers = [int(argument) for argument in arguments if argument.isdigit()]
    parts = [argument for argument in arguments if not argument.isdigit()] or ["bugs", "seeds", "deep"]
    content: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    content["environment"] = environment()
    if "bugs" in parts:
        content["bugs"] = measure_bugs()
        print(summary(content["bugs"]))
        draw(content["bugs"], FIGURE)
    if "seeds" in parts:
        content["seeds"] = measure_seeds(numbers[0] if numbers else SEEDS)
        total = sum(content["seeds"]["comparisons"].values())
        print(f"{total} comparisons of pairs without bugs, {len(content['seeds']['alarms'])} false alarms")
    if "deep" in parts:
        content["deep"] = measure_deep()
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {RESULT}")
    if "bugs" in parts:
        share = sum(row["is_right"] for row in content["bugs"]) / len(content["bugs"])
        assert share >= REQUIRED, f"expected at least {REQUIRED:.0%} of the bugs located, got {share:.0%}"
    if "seeds" in parts:
        alarms = content["seeds"]["alarms"]
        assert not alarms, f"expected no false alarm, got {len(alarms)}, the first: {alarms[0]}"
    if "deep" in parts:
        for row in content["deep"]:
            assert row["located"] == row["module"], row
            assert row["seconds"] < DEEP_SECONDS, row
            assert row["peak_bytes"] < DEEP_BYTES, row


if __name__ == "__main__":
    main(sys.argv[1:])
