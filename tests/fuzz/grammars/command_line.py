"""Valid and invalid command lines: each is executed, or refused with one message that names the error.

A line has a command and flags whose values are usual, odd or impossible, with typos, abbreviations, repeats and missing
values. Lines of kind ``planned`` are configurations that train; each of them must be planned.
"""

import contextlib
import io
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.training import check_trainable
from parity.cli.commands import COMMANDS
from parity.cli.flags import OTHER_NAMES, flag, flags_of
from parity.cli.main import main
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong

HARD_CASES = frozenset(
    {"planned", "no layers on the first rank", "pipeline", "typo", "abbreviation", "repeated", "huge", "not a number"}
    | {"empty", "unicode", "no value", "plan", "sample", "train", "info", "curves", "compare", "page"}
)
TINY = "--hidden-size 8 --num-layers 1 --num-attention-heads 2 --seq-length 8 --global-batch-size 2 --eval-iters 1"
FIRST = {"hidden_size": 128, "num_layers": 2, "num_attention_heads": 4, "enable_hyper_connections": True}
"""Settings in which the model of the command differs from the defaults of TransformerConfig."""
USUAL: dict[str, tuple[str, ...]] = {
    "num_layers": ("1", "2", "4", "8"),
    "hidden_size": ("8", "64", "96"),
    "num_attention_heads": ("1", "2", "3", "4"),
    "seq_length": ("1", "8", "100", "4096"),
    "pipeline_model_parallel_size": ("2", "3", "4"),
    "virtual_pipeline_model_parallel_size": ("2", "3"),
    "context_parallel_size": ("2", "4"),
    "data_parallel_size": ("1", "2", "8"),
    "num_microbatches": ("1", "3", "4", "16"),
    "micro_batch_size": ("1", "2", "3"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "none", "v-half"),
    "pipeline_schedule": ("gpipe", "interleaved", "dualpipe-v"),
    "pipeline_model_parallel_layout": ("E|ttL", "Et|tL", "E t L", "Ettt|L", "E|ttttL", "E(t|)*3L", "", "t*1000000000"),
    "layer_pattern": ("kda", "gdn,attention", "attention+gelu+no-mlp-hc", "mamba", "kda,", "attention+ffn=24"),
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "recompute_num_layers": ("0", "1", "2"),
    "recompute_modules": ("mhc", "mlp", "core_attn", "layernorm"),
    "cp_exchange": ("ring", "scan", "pipelined"),
    "memory_limit": ("1GiB", "80 GB", "3", "1e3MB", "0KB"),
    "ranks": ("1", "2"),
    "html": ("{out}/page.html", "page.txt", "{out}/a/b.html"),
    "picture": ("{out}/a.svg", "a.bmp"),
    "write_schedule": ("{out}/s.csv", "s"),
    "pipeline_schedule_file": ("{out}/none.csv", "{out}"),
    "stage_costs": ("{out}/none.json",),
    "generate_schedule": ("{out}/g.csv", "g.txt"),
    "generate_effort": ("0", "0.01"),
    "temperature": ("0", "0.5", "nan"),
    "seed": ("0", "4294967296"),
    "length": ("0", "1"),
    "prompt": ("a", "", "né"),
    "backend": ("torch", "tf"),
    "save": ("{out}/run", "/dev/null/run"),
    "data_path": ("{out}/text", "{out}/none", "/dev/null"),
    "train_iters": ("1",),
    "nproc": ("1", "0", "3"),
    "num_threads": ("1", "0"),
    "output": ("{out}/c.png",),
    "seq-length": ("8",),
}
"""Typical values, by setting."""
ODD = {
    "huge": ("1000000000000000000000", "1e308", "99999999", "1e400"),
    "negative": ("-1", "-0", "-3.5"),
    "not a number": ("nan", "inf", "-inf", "x", "1.5", "0x10", "1_0", "None", "True", "[1]"),
    "empty": ("", " "),
    "unicode": ("é", "٣", "\u202e2", "日本", "\x00", "2\n3"),
}
KINDS = (
    "planned",
    "planned",
    "planned",
    "plan",
    "plan",
    "plan",
    "plan",
    "train",
    "compare",
    "sample",
    "info",
    "curves",
)
SMALL = ("num_microbatches", "num_layers", "seq_length", "data_parallel_size", "pipeline_model_parallel_size", "ranks")
"""Settings whose huge values are drawn below 10**5, so that they are executed and not only refused."""
COSTLY = frozenset(
    {"generate_schedule", "memory_limit", "ranks", "nproc", "train_iters", "num_processes", "process_id"}
)
RARE = COSTLY | {
    "coordinator_address",
    "resume_if_saved",
    "resume",
    "num_threads",
    "eval_iters",
    "save_interval",
}
INTERNALS = re.compile(
    r"Traceback|Error parsing|invalid literal|<class|object at 0x|dataclass|TransformerConfig|TrainConfig|TrainingRun|"
    r"\b(Plan|Train|Compare|Sample|Info|Curves)\b|pp_size|group_size|stages_per_rank|tyro|argparse|KeyError|unhashable"
)


class Line(NamedTuple):
    """A command line; ``{out}`` is replaced by a new folder."""

    kind: str
    arguments: tuple[str, ...]
    uses: tuple[str, ...]


def draw(rng: np.random.Generator) -> Line:
    """Draw a command line."""
    kind = _one(rng, KINDS)
    if kind == "planned":
        return _planned(rng)
    uses = {kind}
    arguments = [kind]
    settings = flags_of(COMMANDS[kind])
    if kind in ("train", "compare"):
        arguments += [*TINY.split(), "--train-iters", "1", "--data-path", "{out}/text"]
        arguments += ["--output-dir", "{out}/o"] if kind == "compare" else []
    if kind in ("sample", "info", "curves") and rng.random() < 0.9:
        arguments.append(_one(rng, ("{out}", "{out}/none", "{out}/text", "", "é")))
    names = [name for name in settings if name in USUAL] if rng.random() < 0.7 else [*settings]
    names = [name for name in names if name not in RARE or rng.random() < 0.15]
    for _ in range(int(rng.integers(0, 5))):
        if names:
            arguments += _flag(rng, _one(rng, names), settings, uses)
    if kind in ("train", "compare") and rng.random() < 0.98:  # training is slow, so the last flag is refused
        arguments += [
            _one(rng, ("--train-iters=0", "--lr=-1", "--num-threads=0", "--log-interval=0", "--adam-eps=nan"))
        ]
    if "--html" in arguments:
        uses.add("page")
    return Line(kind, tuple(arguments), tuple(sorted(uses)))


def features(program: Line) -> Iterable[str]:
    """Name the features of a command line."""
    return program.uses


def check(program: Line) -> Outcome:
    """Run the command line in this process.

    Raises:
        Wrong: if it is neither executed nor refused, or its messages show internals.
    """
    folder = Path(tempfile.mkdtemp(prefix="fuzz_command"))
    (folder / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 30)
    out = io.StringIO()
    err = io.StringIO()
    threads = torch.get_num_threads()
    try:
        arguments = [argument.replace("{out}", str(folder)) for argument in program.arguments]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(arguments)
            except SystemExit as stop:
                code = stop.code
        return _judge(program, code, out.getvalue(), err.getvalue())
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(folder)


def _judge(program: Line, code: Any, out: str, err: str) -> Outcome:
    if code == 0:
        if err.strip() or (program.kind != "sample" and not out.strip()):
            raise Wrong(f"done, with standard error {err!r} and {len(out)} characters of output")
        if re.search(r"\b(nan|inf)\b", out):
            raise Wrong(f"a number that is none in {out!r}")
        if program.kind in ("plan", "planned"):
            _check_names(out)
        return Outcome(EQUAL)
    if code != 2:
        raise Wrong(f"exit status {code!r}: {err!r}")
    if program.kind == "planned":
        raise Wrong(f"a configuration that trains is not planned: {err!r}")
    message = err.removeprefix("diptych: ").rstrip("\n")
    if not err.startswith("diptych: ") or not message.strip() or "\n" in message:
        raise Wrong(f"expected one line that begins with diptych:, got {err!r}")
    ours = re.sub(r"'[^']*'|\"[^\"]*\"", "''", message)
    if found := INTERNALS.search(ours):
        raise Wrong(f"internals in a message: {found[0]!r} in {message!r}")
    _check_names(ours)
    if not re.search(r"--[a-z]|expected a command|expected only flags|checkpoint|runs|config|fuzz_command", message):
        raise Wrong(f"no flag is named: {message!r}")
    return Outcome(REFUSED, re.sub(r"'[^']*'|/tmp/\S+|\d+", "_", message))


def _check_names(text: str) -> None:
    """Check that a text names settings by their flags."""
    names = {name for kind in COMMANDS.values() for name in flags_of(kind) if "_" in name} | {*OTHER_NAMES}
    for word in re.findall(r"(?<![\w./-])[a-z]+(?:_[a-z]+)+(?![\w./])", text):
        if word in names:
            raise Wrong(f"a variable instead of a flag: {word!r} in {text!r}")


def _one(rng: np.random.Generator, among: Any) -> Any:
    return among[int(rng.integers(len(among)))]


def _flag(rng: np.random.Generator, name: str, settings: dict[str, Any], uses: set[str]) -> list[str]:
    """Draw a flag and its value, and record its oddities."""
    spelled = flag(name)
    is_switch = settings.get(name) is bool
    if "pipeline" in name:
        uses.add("pipeline")
    if is_switch and rng.random() < 0.9:
        return [spelled if rng.random() < 0.7 else f"--no-{spelled[2:]}"]
    chance = rng.random()
    if chance < 0.06:
        uses.add("typo")
        place = int(rng.integers(3, len(spelled)))
        spelled = _one(
            rng, (spelled[:place] + spelled[place + 1 :], spelled + "s", spelled.replace("-", "_"), f"-{name}")
        )
    elif chance < 0.1:
        uses.add("abbreviation")
        spelled = spelled[: max(3, len(spelled) - int(rng.integers(1, 6)))]
    if rng.random() < 0.05:
        uses.add("no value")
        return [spelled]
    if name in USUAL and rng.random() < 0.75:
        value = _one(rng, USUAL[name])
    else:
        kind = _one(rng, [*ODD])
        uses.add(kind)
        value = _one(rng, ODD[kind])
        if kind == "huge" and name in SMALL:
            value = str(int(10 ** rng.uniform(3, 5))) if name not in ("ranks", "num_layers") else "1000"
    once = [f"{spelled}={value}"] if rng.random() < 0.3 else [spelled, value]
    if rng.random() < 0.07:
        uses.add("repeated")
        return [*once, spelled, _one(rng, USUAL.get(name, ("1", "2")))]
    return once


def _planned(rng: np.random.Generator) -> Line:
    """Draw a configuration that trains, as a command line of plan."""
    while True:
        settings, uses = _settings(rng)
        sizes = [int(_one(rng, among)) for among in ((1, 2, 4), (1, 2, 3, 4, 8), (1, 1, 2))]
        micro, count, replicas = sizes
        try:
            config = TransformerConfig(**settings)
            train = TrainConfig(global_batch_size=micro * count * replicas, micro_batch_size=micro)
            check_trainable(config, train, replicas)
        except (ValueError, NotImplementedError):
            continue
        arguments = ["plan", "--micro-batch-size", str(micro), "--num-microbatches", str(count)]
        arguments += ["--data-parallel-size", str(replicas), *_flags_of_config(config)]
        if rng.random() < 0.2 and config.cp_exchange != "pipelined":
            arguments += ["--html", "{out}/page.html"]
            uses.add("page")
        return Line("planned", tuple(arguments), tuple(sorted(uses)))


def _settings(rng: np.random.Generator) -> tuple[dict[str, Any], set[str]]:
    uses = {"planned"}
    layers = int(rng.integers(1, 7))
    settings: dict[str, Any] = {
        "hidden_size": _one(rng, (8, 16)),
        "num_attention_heads": _one(rng, (1, 2)),
        "num_layers": layers,
        "seq_length": _one(rng, (1, 2, 8, 64)),
        "layer_pattern": _one(rng, ("attention", "kda", "gdn", "gdn,kda,attention+gelu", "attention+no-mlp-hc")),
        "params_dtype": _one(rng, ("float32", "float64")),
    }
    for name in ("enable_hyper_connections", "use_flash_attn", "add_bias_linear", "calculate_per_token_loss"):
        settings[name] = bool(rng.random() < 0.5)
    settings["bf16"] = settings["params_dtype"] == "float32" and bool(rng.random() < 0.5)
    if rng.random() < 0.6:
        uses |= _pipeline(rng, settings, layers)
    if rng.random() < 0.3:
        settings["context_parallel_size"] = _one(rng, (2, 4))
        settings["cp_exchange"] = _one(rng, ("all_gather", "ring", "scan", "pipelined"))
        settings["cp_attention_layout"] = _one(rng, ("contiguous", "zigzag"))
    settings |= _one(
        rng,
        (
            {},
            {"recompute_granularity": "full", "recompute_method": "uniform"},
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers // 2},
            {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
            {"recompute_activation_function": True},
        ),
    )
    if rng.random() < 0.5:
        settings["enable_tensor_offload"] = True
        settings["tensor_offload_num_prefetch_layers"] = int(rng.integers(0, 4))
    settings["enable_activation_offload"] = bool(rng.random() < 0.3)
    if settings["enable_activation_offload"] and rng.random() < 0.5:
        last = layers - 1
        choices = ("0", f"0-{last}", f"{layers // 2}", f"0-{last}:fc1+core_attn", f"0:q,{last}:q+residual_streams")
        settings["activation_offload_layers"] = _one(rng, choices)
    return settings, uses


def _pipeline(rng: np.random.Generator, settings: dict[str, Any], layers: int) -> set[str]:
    """Draw a pipeline, often with stages that have no layer."""
    ranks = int(_one(rng, (2, 2, 3, 4)))
    virtual = _one(rng, (None, None, 2))
    settings["pipeline_model_parallel_size"] = ranks
    settings["virtual_pipeline_model_parallel_size"] = virtual
    settings["pipeline_schedule"] = _one(
        rng, (None, "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-min", "dualpipe-v")
    )
    if rng.random() < 0.7:
        count = ranks * (virtual or 1)
        cuts = [0, *sorted(rng.integers(0, layers + 1, count - 1).tolist()), layers]
        stages = ["t" * (end - begin) for begin, end in pairwise(cuts)]
        settings["pipeline_model_parallel_layout"] = "E" + "|".join(stages) + "L"
        first = stages[0] + (
            stages[ranks] if virtual and settings["pipeline_schedule"] in (None, "interleaved") else ""
        )
        if not first and settings.get("pipeline_schedule") not in ("zb-v", "v-min", "dualpipe-v"):
            return {"pipeline", "no layers on the first rank"}
    return {"pipeline"}


def _flags_of_config(config: TransformerConfig) -> list[str]:
    """Write a configuration as flags."""
    found: list[str] = []
    for each in fields(config):
        value = getattr(config, each.name)
        spelled = flag(each.name)
        if value == FIRST.get(each.name, each.default):
            continue
        if isinstance(value, bool):
            found.append(spelled if value else f"--no-{spelled[2:]}")
        elif isinstance(value, tuple):
            found += [spelled, *value]
        else:
            found += [spelled, str(value)]
    return found
