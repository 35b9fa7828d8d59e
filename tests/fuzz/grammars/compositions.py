"""Accepted configurations of training: runs that are saved on one mesh and resumed on another.

A program is a model, two executions (schedule, layout of stages, context ranks, replicas, recompute, offload, backend),
and the number of steps before the checkpoint. The final checkpoint must contain the parameters and both moments of an
uninterrupted plain run of one PyTorch process, and each step must report the same losses. ``diptych plan`` must accept
both executions. Some programs change a setting of the model at the checkpoint; those must be refused.
"""

import io
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from diptych.plans.checkpoint import FIRST_MOMENT, MODEL, SECOND_MOMENT, CheckpointError, read_checkpoint
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.schedule.csv import read_schedule, schedule_to_csv
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.placement import INTERLEAVED_SCHEDULES, SCHEDULES, V_SCHEDULES
from diptych.plans.training import check_trainable, microbatches
from parity.cli.commands import Plan
from parity.cli.main import _plan  # pyright: ignore[reportPrivateUsage]
from reference_torch.rank_pool import RankError, RankPool, preload
from tests.composition import BASE, DIMENSIONS, HYPER, LIKE_ANY
from tests.fuzz.grammars import _composition_run as runs
from tests.fuzz.grammars._composition_run import Part, Result
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong
from tests.fuzz.jax_child import run_in_child

JOBS = "tests.fuzz.grammars._composition_run"
preload(JOBS)
SECONDS = 60.0
"""Timeout in seconds; parts take a fraction of a second."""
PATTERNS = (
    "attention",
    "attention",
    "kda",
    "gdn",
    "kda,attention",
    "gdn,kda",
    "attention+gelu,attention",
    "gdn,kda,kda",
)
OTHER = {"hidden_dropout": 0.7, "seed": 12, "init_method_std": 0.19, "sinkhorn_iterations": 7, "layernorm_epsilon": 0.1}
"""Settings with values that no drawn model has."""

LOSS = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-2}
"""Absolute tolerance of the losses of each step."""
STATE = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 1e-1}
"""Norm-wise relative tolerance of parameters and moments after all steps. In float32 and bfloat16, AdamW divides by
small roots and so amplifies differences of gradients, which parity.tolerances bounds by 1e-5 and 4e-2."""
SHARE = {"float64": 1e-6, "float32": 1e-1, "bfloat16": 3e-1}
"""Share of the largest norm of a kind of array. Arrays below it are measured against it, because terms cancel."""

HARD_CASES = frozenset(
    {
        *(name for name in SCHEDULES if name != "none"),
        "tied on one rank",
        "empty stage",
        "empty rank",
        "one layer",
        "schedule file",
        "context ranks",
        "replicas",
        "tensor-parallel ranks",
        "tokens of tensor-parallel ranks",
        "four ranks",
        "mHC",
        "dropout",
        "documents",
        "bf16",
        "parameters offloaded",
        "activations offloaded",
        "recompute",
        "JAX",
        "stale steps",
        "refused",
        *("kda", "gdn"),
    }
)


@dataclass(frozen=True)
class Execution:
    """One execution of training."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the configuration that do not change the model."""
    replicas: int = 1
    file: bool = False
    """True if the schedule is read from a file."""
    backend: str = "torch"


@dataclass(frozen=True)
class Program:
    """A model, and its executions before and after the checkpoint."""

    model: dict[str, Any]
    batch: tuple[int, int]
    """Sequences per step and per microbatch."""
    before: Execution
    after: Execution
    steps: tuple[int, int]
    """Numbers of steps before and after the checkpoint."""
    documents: bool = False
    stale_steps: int = 0
    """Steps that the second trainer takes before it reads the checkpoint."""
    validates: bool = False
    """True if the validation loss is computed after each step."""
    other: str = ""
    """A setting of the model that is changed at the checkpoint."""


def config_of(program: Program, execution: Execution) -> TransformerConfig:
    """Return the configuration of an execution with a named schedule."""
    return replace(BASE, **program.model, **execution.settings)


def train_of(program: Program) -> TrainConfig:
    """Return the configuration of the optimisation."""
    size, micro = program.batch
    return TrainConfig(
        train_iters=sum(program.steps) + 1,
        global_batch_size=size,
        micro_batch_size=micro,
        lr=3e-3,
        min_lr=3e-4,
        lr_warmup_iters=2,
        eval_iters=1,
    )


# Drawing.


def draw(rng: np.random.Generator) -> Program:
    """Draw a program that is accepted."""
    while True:
        program = _draw(rng)
        train = train_of(program)
        try:
            for execution in (program.before, program.after):
                check_trainable(config_of(program, execution), train, execution.replicas)
        except ValueError:
            continue
        if "jax" not in (program.before.backend, program.after.backend) or _compiles_soon(program):
            return program


def _compiles_soon(program: Program) -> bool:
    """Return True if JAX compiles a program in seconds."""
    ranks = [
        config_of(program, execution).model_parallel_size * execution.replicas
        for execution in (program.before, program.after)
    ]
    return program.model["num_layers"] <= 2 and "enable_hyper_connections" not in program.model and max(ranks) <= 2


def _draw(rng: np.random.Generator) -> Program:
    model: dict[str, Any] = {"num_layers": int(rng.choice([1, 2, 2, 2, 3, 4])), "layer_pattern": _pick(rng, PATTERNS)}
    if rng.random() < 0.35:
        model |= _pick(rng, [*DIMENSIONS["streams"].values()])
    for name, chance in (("dropout", 0.25), ("attention", 0.3), ("biases", 0.2), ("loss", 0.2), ("embedding", 0.3)):
        if rng.random() < chance:
            model |= _pick(rng, [*DIMENSIONS[name].values()])
    chance = rng.random()
    if chance < 0.12:
        model |= {"params_dtype": "float32", "bf16": chance < 0.07}
    in_jax = rng.random() < 0.08 and model.get("params_dtype") is None
    size = int(rng.choice([4, 8]))
    before, after = (_draw_execution(rng, model) for _ in range(2))
    if in_jax:
        before, after = (before, replace(after, backend="jax"))[:: 1 if rng.random() < 0.5 else -1]
    refused = not in_jax and rng.random() < 0.04
    return Program(
        model,
        (size, int(rng.choice([1, 2, 2, 4]))),
        before,
        after,
        (int(rng.integers(1, 3)), int(rng.integers(1, 3))),
        documents=rng.random() < 0.3,
        stale_steps=int(rng.random() < 0.15),
        validates=rng.random() < 0.15,
        other=_pick(rng, [*OTHER]) if refused else "",
    )


def _draw_execution(rng: np.random.Generator, model: Mapping[str, Any]) -> Execution:
    """Draw an execution, mostly on two ranks, rarely on four."""
    kind = str(rng.choice(["one", "pipeline", "context", "replicas", "four"], p=[0.33, 0.47, 0.1, 0.05, 0.05]))
    settings: dict[str, Any] = {}
    replicas = 2 if kind == "replicas" else 1
    if kind == "context":
        settings |= _pick(rng, [*DIMENSIONS["context"].values()])
    if kind == "four":
        mesh = str(rng.choice(["pp 4", "pp 2 cp 2", "pp 2 dp 2"]))
        replicas = 2 if "dp" in mesh else 1
        if "cp" in mesh:
            settings |= _pick(rng, [*DIMENSIONS["context"].values()])
        settings |= _draw_schedule(rng, model, 4 if mesh == "pp 4" else 2)
    if kind == "pipeline":
        settings |= _draw_schedule(rng, model, 2)
    if kind in ("one", "pipeline", "context") and rng.random() < 0.12:
        settings |= {"tensor_model_parallel_size": 2, "sequence_parallel": bool(rng.random() < 0.5)}
    for name, chance in (
        ("recompute", 0.35),
        ("parameters offloaded", 0.25),
        ("activations offloaded", 0.2),
        ("messages", 0.2),
    ):
        if rng.random() < chance:
            settings |= _pick(rng, [*DIMENSIONS[name].values()])
    if "mhc" in settings.get("recompute_modules", ()) and not model.get("enable_hyper_connections"):
        settings["recompute_modules"] = ("layernorm",)
        settings.pop("mhc_recompute_layer_num", None)
    for name in (*HYPER, "do_self_attention_hyper_connection"):
        settings.pop(name, None)
    return Execution(settings, replicas, file="pipeline_schedule" in settings and rng.random() < 0.15)


def _draw_schedule(rng: np.random.Generator, model: Mapping[str, Any], p: int) -> dict[str, Any]:
    """Draw a schedule and where layers are placed: evenly, counting ends, or written out at random."""
    name = _pick(rng, [each for each in SCHEDULES if each != "none"])
    v = 2 if name in V_SCHEDULES or name in INTERLEAVED_SCHEDULES else 1
    settings = {"pipeline_schedule": name, "pipeline_model_parallel_size": p}
    if v > 1:
        settings["virtual_pipeline_model_parallel_size"] = v
    layers = model["num_layers"]
    chance = rng.random()
    if chance < 0.1:
        counted = ["account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"]
        return settings | {each: True for each in counted if rng.random() < 0.7}
    if layers % (p * v) == 0 and chance < 0.4:
        return settings
    cuts = np.sort(rng.integers(0, layers + 1, p * v - 1))
    counts = np.diff([0, *cuts, layers])
    stages = ["t" * int(count) for count in counts]
    return settings | {"pipeline_model_parallel_layout": f"E{'|'.join(stages)}L"}


def _pick(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def features(program: Program) -> Iterable[str]:
    """Name the difficult features of a program."""
    from diptych.plans.schedule.partition import get_stage_place, layers_by_stage

    executions = (program.before, program.after)
    for execution in executions:
        config = config_of(program, execution)
        counts = layers_by_stage(config)
        by_rank: dict[int, int] = {}
        for stage, layers in enumerate(counts):
            rank = get_stage_place(config, stage).pp_rank
            by_rank[rank] = by_rank.get(rank, 0) + layers
        name = config.pipeline_schedule or "none"
        tied = not config.untie_embeddings_and_output_weights
        hard = {
            name: True,
            "tied on one rank": name in V_SCHEDULES and tied and execution is program.after,
            "empty stage": 0 in counts,
            "empty rank": 0 in by_rank.values(),
            "schedule file": execution.file,
            "context ranks": config.context_parallel_size > 1,
            "replicas": execution.replicas > 1,
            "tensor-parallel ranks": config.tensor_model_parallel_size > 1,
            "tokens of tensor-parallel ranks": config.sequence_parallel,
            "four ranks": execution.replicas * config.model_parallel_size == 4,
            "parameters offloaded": config.enable_tensor_offload,
            "activations offloaded": config.enable_activation_offload,
            "recompute": config.recompute_granularity is not None,
            "JAX": execution.backend == "jax",
            "one layer": config.num_layers == 1,
            "mHC": config.enable_hyper_connections,
            "dropout": config.hidden_dropout > 0.0,
            "bf16": config.bf16,
            "kda": "kda" in config.layer_pattern,
            "gdn": "gdn" in config.layer_pattern,
            "documents": program.documents,
            "stale steps": program.stale_steps > 0,
            "refused": bool(program.other),
        }
        yield from (each for each, has in hard.items() if has)


# Running.

_pools: dict[int, RankPool] = {}


def _run(part: Part, backend: str) -> Result:
    """Run a part on its ranks or JAX devices."""
    if backend == "jax":
        return run_in_child(f"{JOBS}:run_jax", part)
    if part.ranks == 1:
        return runs.run_torch(part)
    pool = _pools.setdefault(part.ranks, RankPool(part.ranks, SECONDS))
    return pool.run(f"{JOBS}:run_torch", part)[0]


def check(program: Program) -> Outcome:
    """Plan both executions, train with a checkpoint between them, and compare with the plain run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configs = [_with_file(program, execution, folder) for execution in (program.before, program.after)]
        for config, execution in zip(configs, (program.before, program.after), strict=True):
            _check_plan(program, execution, config, folder)
        if program.other:
            configs[1] = replace(configs[1], **{program.other: OTHER[program.other]})
        return _check_run(program, configs, folder)


def _with_file(program: Program, execution: Execution, folder: Path) -> TransformerConfig:
    config = config_of(program, execution)
    if not execution.file:
        return config
    path = folder / f"{'before' if execution is program.before else 'after'}.csv"
    count = microbatches(train_of(program), execution.replicas)[1]
    path.write_text(schedule_to_csv(schedule_for(config, count)))
    return replace(config, pipeline_schedule=None, pipeline_schedule_file=read_schedule(path))


def _check_plan(program: Program, execution: Execution, config: TransformerConfig, folder: Path) -> None:
    """Plan one execution, which must not be refused."""
    size, count = microbatches(train_of(program), execution.replicas)
    page = folder / "plan.html" if program.validates and config.cp_exchange != "pipelined" else None
    output = io.StringIO()
    command = Plan(config, size, num_microbatches=count, data_parallel_size=execution.replicas, html=page)
    if _plan(command, Console(file=output, width=160)) != 0 or not output.getvalue():
        raise Wrong(f"nothing was planned for {execution}")
    if re.search(r"\b(nan|inf)\b", output.getvalue()):
        raise Wrong(f"a plan has numbers that are none: {output.getvalue()}")


def _check_run(program: Program, configs: list[TransformerConfig], folder: Path) -> Outcome:
    """Train, save, resume and compare."""
    first, last = program.steps
    before = Part(
        configs[0],
        train_of(program),
        program.before.replicas * configs[0].model_parallel_size,
        program.documents,
        0,
        first,
        folder / "one",
        validates=program.validates,
    )
    after = before._replace(
        model=configs[1],
        ranks=program.after.replicas * configs[1].model_parallel_size,
        first=first,
        last=first + last,
        saved=folder / "two",
        resumed=folder / "one",
        stale_steps=program.stale_steps,
    )
    found = _run(before, program.before.backend)
    try:
        rest = _run(after, program.after.backend)
    except (CheckpointError, RankError) as error:
        if program.other and re.search(rf"CheckpointError: .*\b{program.other} ", f"CheckpointError: {error}"):
            return Outcome(REFUSED, "a setting of the model was changed at the checkpoint")
        raise
    if program.other:
        raise Wrong(f"{program.other} was changed at the checkpoint, and nothing was said")
    result = Result(*(a + b for a, b in zip(found, rest, strict=True)))
    _compare(before, result, read_checkpoint(folder / "two").arrays)
    return Outcome(EQUAL)


# Comparing.


def _plain(part: Part, last: int, micro_batch_size: int, **settings: Any) -> tuple[Result, dict[str, np.ndarray]]:
    """Run the plain model in this process from the beginning; also return the content of its checkpoint."""
    model = replace(part.model, **LIKE_ANY, **settings)
    train = replace(part.train, micro_batch_size=micro_batch_size)
    with tempfile.TemporaryDirectory() as name:
        result = runs.run_torch(part._replace(model=model, train=train, ranks=1, last=last, saved=Path(name)))
        return result, read_checkpoint(name).arrays


def _compare(part: Part, result: Result, arrays: dict[str, np.ndarray]) -> None:
    """Compare everything that a run reported and saved with the plain run.

    In float32 and bfloat16, a difference above the tolerance is compared with that of two plain runs that round
    differently, because training amplifies rounding errors, in some models by orders of magnitude.
    """
    dtype = part.model.compute_dtype
    last = len(result.losses)
    micro = part.train.microbatch
    size = part.train.global_batch_size
    plain = _plain(part, last, size if dtype == "float64" else micro)
    worst = max(_distances((result, arrays), plain, dtype), key=lambda each: each[1])
    if worst[1] <= 1.0:
        return
    allowed = 1.0
    if dtype != "float64":
        others = [_plain(part, last, size if micro != size else 1)]
        others += [_plain(part, last, micro, bf16=False)] if dtype == "bfloat16" else []
        allowed = 3.0 * max(away for other in others for _, away in _distances(other, plain, dtype))
    if not worst[1] <= max(1.0, allowed):
        raise Wrong(f"{worst[0]}; {worst[1]:.1e} of the tolerance, rounding explains {allowed:.1e}")


def _distances(
    ours: tuple[Result, dict[str, np.ndarray]], theirs: tuple[Result, dict[str, np.ndarray]], dtype: str
) -> Iterator[tuple[str, float]]:
    """Yield a description of each comparison and its difference in units of the tolerance."""
    for name, found, expected in zip(Result._fields, ours[0], theirs[0], strict=True):
        if len(found) != len(expected):
            raise Wrong(f"{name}: expected {expected}, got {found}")
        for a, b in zip(found, expected, strict=True):
            scale = max(1.0, 100 * abs(b)) if name == "norms" else 1.0
            yield f"{name}: expected {expected}, got {found}", _or_infinite(abs(a - b) / (scale * LOSS[dtype]))
    if ours[1].keys() != theirs[1].keys():
        raise Wrong(f"arrays: expected {sorted(theirs[1])}, got {sorted(ours[1])}")
    for kind in (MODEL, FIRST_MOMENT, SECOND_MOMENT):
        names = [name for name in theirs[1] if name.startswith(kind)]
        floor = SHARE[dtype] * max(float(np.linalg.norm(theirs[1][name])) for name in names)
        for name in names:
            difference = float(np.linalg.norm(ours[1][name].astype(np.float64) - theirs[1][name]))
            scale = max(floor, float(np.linalg.norm(theirs[1][name])))
            yield f"{name}: difference {difference:.1e} of {scale:.1e}", _or_infinite(difference / scale / STATE[dtype])


def _or_infinite(value: float) -> float:
    return value if value == value else float("inf")  # NaN compares as smaller than everything
