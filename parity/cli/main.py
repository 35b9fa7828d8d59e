"""The ``diptych`` command.

A subcommand imports only the backends that it uses: ``diptych train --backend jax`` runs without PyTorch, and
``--backend torch`` without JAX.
"""

import importlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from diptych.planner.page import PageRequest, write_page
from diptych.planner.reports.console import print_written
from diptych.planner.reports.context import print_context
from diptych.planner.reports.generate import print_generated
from diptych.planner.reports.memory import describe_blocks, describe_fit, print_plan
from diptych.planner.reports.mesh import describe_mesh, print_mesh
from diptych.planner.reports.offload import print_offload
from diptych.planner.reports.schedule import print_schedule
from diptych.planner.reports.search import print_search
from diptych.planner.step_time import StageTimes
from diptych.plans.amax_history import is_history
from diptych.plans.checkpoint import (
    MODEL,
    check_unused,
    initial_weights,
    list_checkpoints,
    read_checkpoint,
    recorded_model,
    split_arrays,
)
from diptych.plans.config import TransformerConfig
from diptych.plans.families.folder import SOURCE, copy_source, export_folder, import_folder, source_of
from diptych.plans.mesh import unsharded
from diptych.plans.model.data import load_corpus
from diptych.plans.model.implementation import callback_threads
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.model.sampling import next_token, text_of
from diptych.plans.schedule.csv import schedule_to_csv
from diptych.plans.schedule.messages import PipelineError
from diptych.plans.schedule.named import schedule_for
from diptych.plans.training import NonFiniteLossError, check_microbatch
from parity.cli.allocator import keep_freed_memory
from parity.cli.commands import (
    Compare,
    Curves,
    Export,
    Import,
    Info,
    Locate,
    Plan,
    Sample,
    Train,
    TrainingRun,
)
from parity.cli.flags import in_flags, parse
from parity.cli.launch import (
    check_devices,
    check_processes,
    count_replicas,
    is_one_of_several,
    join_devices,
    join_processes,
    rank,
    reports_errors,
)
from parity.cli.output import standard_output
from parity.cli.processes import start_processes
from parity.cli.run import SavePlan, run_training
from parity.cli.tokenizer import tokenizer_beside
from parity.frameworks import import_with_frameworks

USER_ERROR = 2
FAILURE = 1
INTERRUPTED = 130
PLAIN_WIDTH = 100
"""Columns of the output if it is not a terminal."""
PACKAGES = {"torch": "reference_torch", "jax": "jax_impl"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``diptych``.

    Args:
        arguments: command line without the program's name; None: that of the process.

    Returns:
        The exit code. 0: success; 1: over tolerance or training failed; 2: invalid input; 130: interrupted.
        Codes other than 0 come with one line on standard error that names the cause, or with the report of the
        differences. Standard output that closes early, as in ``diptych plan | head``, is a success.
    """
    with standard_output() as output:
        code = _run(arguments)
        output.flush()
    if output.failure is None or isinstance(output.failure, BrokenPipeError):
        return code
    print(f"diptych: standard output: {output.failure.strerror or output.failure}", file=sys.stderr)
    return code or FAILURE


def _run(arguments: Sequence[str] | None) -> int:
    """Execute a command line; see main."""
    console = Console(quiet=rank() > 0) if sys.stdout.isatty() else Console(quiet=rank() > 0, width=PLAIN_WIDTH)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        command = parse(arguments)
        if isinstance(command, Train):
            check_processes(command)
            if command.backend == "torch" and command.ranks_here > 1 and not is_one_of_several():
                silence = command.model.pipeline_timeout
                return start_processes(command.ranks_here, "parity.cli", arguments, command.join_timeout, silence)
        return _ACTIONS[type(command)](command, console)
    except (ValueError, ModuleNotFoundError, NotImplementedError) as error:
        if reports_errors():  # the other processes have the same error
            print(f"diptych: {in_flags(str(error), next(iter(arguments), None))}", file=sys.stderr)
        return USER_ERROR
    except (NonFiniteLossError, OSError, PipelineError) as error:
        print(f"diptych: {error}", file=sys.stderr)
        return FAILURE
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate|RESOURCE_EXHAUSTED", str(error)):
            raise
        first_line = (str(error) or "out of memory").splitlines()[0]
        print(f"diptych: expected a run that fits this machine's memory, got: {first_line}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("diptych: interrupted", file=sys.stderr)
        return INTERRUPTED


def _load_backend(backend: str, params_dtype: str, num_threads: int = 1, ranks: int = 1, impl: str = "auto"):
    """Return the train module of a backend, after setting threads, devices and dtypes.

    Raises:
        ModuleNotFoundError: the backend's framework is not installed.
    """
    module = import_with_frameworks(f"{PACKAGES[backend]}.train", "backend")
    if backend == "torch":
        import torch

        torch.set_num_threads(num_threads)
    else:
        import jax

        keep_freed_memory()
        if params_dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        if ranks > 1 and impl == "triton":
            os.environ.setdefault("NPROC", str(callback_threads(ranks)))  # JAX reads it on first use
        if ranks > 1:
            # One CPU device per rank; no effect on a machine with accelerators.
            jax.config.update("jax_num_cpu_devices", ranks)
    return module


def _demands(run: TrainingRun) -> tuple[str, int, int, str]:
    """Return the arguments of _load_backend for a run."""
    model = run.model
    return model.params_dtype, run.num_threads, run.ranks_here, model.impl


def _compare(command: Compare, console: Console) -> int:
    """Run ``diptych compare`` and return the exit code."""
    replicas = count_replicas(command)
    for backend in PACKAGES:
        _load_backend(backend, *_demands(command))
    check_devices(command.ranks_here)
    from parity import compare, report

    corpus = load_corpus(command.data, tokenizer_beside(command.init))
    _check_output(command.output_dir, ("report.json", "compare.png"))
    _print_setting(command, corpus, console)
    seen = report.environment()
    console.print(
        f"threads: torch {seen['torch_threads']}, XLA up to {seen['xla_cores']}; both train at the same time\n"
    )
    with report.LiveComparison(console, command.train.train_iters, command.log_interval) as live:
        result = compare.compare(
            command.model,
            command.train,
            corpus,
            loss_tolerance=command.loss_tolerance,
            gradient_tolerance=command.gradient_tolerance,
            parameters=None if command.init is None else initial_weights(_weights(command.init), command.model),
            replicas=replicas,
            on_step=live.step,
        )
    console.print()
    report.print_summary(console, result)
    report.write_json(command.output_dir / "report.json", result, command.model, command.train, corpus)
    report.write_picture(command.output_dir / "compare.png", result)
    print_written(console, command.output_dir / "report.json", command.output_dir / "compare.png")
    return FAILURE if result.failures else 0


def _train(command: Train, console: Console) -> int:
    """Run ``diptych train`` and return the exit code."""
    module = _load_backend(command.backend, *_demands(command))
    place = _place(command)
    console.quiet |= (command.process_id or 0) > 0
    corpus = load_corpus(command.data, tokenizer_beside(command.init))
    if command.save is not None:
        _check_output(command.save, ())
    _print_setting(command, corpus, console)
    trainer = module.Trainer(command.model, command.train, corpus, **place)
    plan = SavePlan(command.save, command.save_interval, command.exit_step, command.resume_if_saved)
    resume = command.resume or (command.resume_if_saved and trainer.any_process(_has_checkpoint(command.save)))
    if command.init is not None and not resume:
        trainer.load_weights(command.init)
        source = source_of(command.init)
        if command.save is not None and source is not None and trainer.is_main_process:
            check_unused(command.save, command.resume_if_saved)  # before anything of an earlier run is overwritten
            copy_source(source, command.save / SOURCE)
    run_training(trainer, plan, console, command.log_interval, resume, command.backend)
    return 0


def _has_checkpoint(folder: Path | None) -> bool:
    return folder is not None and bool(list_checkpoints(folder))


def _place(command: Train) -> dict[str, Any]:
    """Return the trainer's arguments for device and mesh."""
    if command.backend == "jax":
        return {"mesh": join_devices(command)}
    if not is_one_of_several():
        return {}
    import torch

    from reference_torch.groups import make_mesh

    device = join_processes("cuda" if torch.cuda.is_available() else "cpu", command.join_timeout)
    return {"device": device, "mesh": make_mesh(command.model, device.type)}


def _plan(command: Plan, console: Console) -> int:
    """Run ``diptych plan`` and return the exit code."""
    for output in (command.picture, command.html, command.write_schedule, command.generate_schedule):
        if output is not None:
            _check_output(output.parent, (output.name,))
    name_settings = partial(in_flags, command="plan")
    if command.ranks is not None:
        print_search(console, command, name_settings)
        return 0
    model = command.model
    shape = (command.micro_batch_size, command.num_microbatches)
    page = (
        PageRequest(model, *shape, command.data_parallel_size, command.machine, name_settings) if command.html else None
    )
    check_microbatch(model, command.micro_batch_size)
    if command.model_source is not None:
        console.print(f"{command.model_source}: {_describe_size(model)}", highlight=False, markup=False)
    console.print(describe_mesh(model, command.data_parallel_size), highlight=False)
    if command.fitted is not None:
        console.print(describe_fit(command.fitted), highlight=False)
    if command.generate_schedule is not None:
        model = print_generated(console, command, command.generate_schedule, name_settings)
    elif model.pipeline_model_parallel_size > 1:
        roofline = StageTimes(command.machine)
        print_schedule(console, model, *shape, picture=command.picture, roofline=roofline, name_settings=name_settings)
        if command.write_schedule is not None:
            command.write_schedule.write_text(schedule_to_csv(schedule_for(model, command.num_microbatches)))
            print_written(console, command.write_schedule)
    else:
        print_plan(console, model, *shape)
    if model.context_parallel_size > 1:
        print_context(console, model, command.micro_batch_size)
    console.print()
    print_mesh(console, model, *shape, command.data_parallel_size)
    if model.enable_tensor_offload:
        print_offload(console, command)
    if command.html is not None and page is not None:
        write_page(command.html, replace(page, config=model))  # with the generated schedule
        print_written(console, command.html)
    return 0


def _sample(command: Sample, console: Console) -> int:
    """Run ``diptych sample`` and return the exit code."""
    config = recorded_model(read_checkpoint(command.checkpoint).settings)
    _load_backend(command.backend, config.params_dtype)
    package = PACKAGES[command.backend]
    saving, decoding = (importlib.import_module(f"{package}.{name}") for name in ("saving", "decoding"))
    tokenizer = tokenizer_beside(command.checkpoint)
    prompt = command.prompt.encode(errors="surrogateescape")  # keeps bytes that are not valid UTF-8
    tokens = [*prompt] if tokenizer is None else tokenizer.encode(prompt)
    total = len(tokens) + command.length
    longest = min(config.seq_length, total)
    if total - 1 > config.seq_length:
        note = f"the text grows to {total} tokens; each is predicted from the last {config.seq_length} (seq_length)"
        print(f"diptych: {note}", file=sys.stderr)
    decoder = decoding.Decoder(saving.load_model(command.checkpoint, seq_length=longest))
    for index in range(command.length):
        logits = decoder.next_logits(np.array(tokens))
        tokens.append(next_token(logits, command.temperature, command.seed, index))
    sys.stdout.write((text_of(tokens) if tokenizer is None else tokenizer.decode(tokens)) + "\n")
    return 0


def _weights(path: Path) -> dict[str, np.ndarray]:
    """Return the weights of a checkpoint, by canonical name."""
    return split_arrays(read_checkpoint(path).arrays, MODEL)


def _info(command: Info, console: Console) -> int:
    """Run ``diptych info`` and return the exit code."""
    checkpoint = read_checkpoint(command.checkpoint)
    parameters = split_arrays(checkpoint.arrays, MODEL)
    sizes = [array.size for array in parameters.values() if not is_history(array.shape)]
    console.print(f"step {checkpoint.step}; {sum(sizes):,} parameters in {len(sizes)} arrays; checksum right")
    for part, settings in checkpoint.settings.items():
        line = f"{part}: " + ", ".join(f"{field} {value}" for field, value in settings.items())
        console.print(line, soft_wrap=True, markup=False)
    return 0


def _import(command: Import, console: Console) -> int:
    """Run ``diptych import`` and return the exit code."""
    found = import_folder(command.folder, command.output)
    console.print(f"{found.family.name}: {_describe_size(found.model)}", highlight=False)
    if found.skipped:
        console.print(f"left out, as transformers does: {', '.join(found.skipped)}", markup=False, soft_wrap=True)
    print_written(console, found.checkpoint)
    return 0


def _describe_size(model: TransformerConfig) -> str:
    """Return the number of layers and parameters of a model."""
    shapes = [spec.shape for spec in parameter_specs(unsharded(model)).values()]
    count = sum(math.prod(shape) for shape in shapes if not is_history(shape))
    return f"{model.num_layers} layers, {count:,} parameters"


def _export(command: Export, console: Console) -> int:
    """Run ``diptych export`` and return the exit code."""
    print_written(console, *export_folder(command.checkpoint, command.folder, command.family, command.dtype))
    return 0


def _curves(command: Curves, console: Console) -> int:
    """Run ``diptych curves`` and return the exit code."""
    from parity.cli.curves import write_curves

    if not command.runs:
        raise ValueError("runs: expected at least one folder given to train --save, got none")
    command.output.parent.mkdir(parents=True, exist_ok=True)
    write_curves(command.runs, command.output)
    print_written(console, command.output)
    return 0


def _locate(command: Locate, console: Console) -> int:
    """Run ``diptych locate`` and return the exit code."""
    location = import_with_frameworks("parity.cli.locate", "locate").run_locate(command)
    console.print(str(location).rpartition("\n")[0], markup=False, highlight=False, soft_wrap=True)
    for name in ("location.json", "location.html", "location.png"):
        print_written(console, command.output_dir / name)
    console.print(location.summary, markup=False, highlight=False, soft_wrap=True)
    return 0 if location.is_equal else FAILURE


_ACTIONS: dict[type, Callable[[Any, Console], int]] = {
    Compare: _compare,
    Train: _train,
    Plan: _plan,
    Sample: _sample,
    Info: _info,
    Import: _import,
    Export: _export,
    Curves: _curves,
    Locate: _locate,
}


def _check_output(folder: Path, names: tuple[str, ...]) -> None:
    """Make the output folder and check that the named files can be written, before time is spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # a unique name, since the run's other processes do the same
            pass
        for name in names:
            if (folder / name).is_dir():
                raise IsADirectoryError(f"a folder named {folder / name}")
            if (folder / name).exists() and not os.access(folder / name, os.W_OK):
                raise PermissionError(f"a file {folder / name} that may not be written")
    except OSError as error:
        raise ValueError(f"{folder}: expected a folder to write to, got {error}") from None


def _print_setting(run: TrainingRun, corpus, console: Console) -> None:
    """Print the model, the training settings and the corpus."""
    model = run.model
    train = run.train
    mhc = f"mHC with {model.num_residual_streams} streams" if model.enable_hyper_connections else "no mHC"
    console.print(
        f"{model.num_layers} layers, D={model.hidden_size}, {model.num_attention_heads} heads, {mhc}, "
        f"{model.compute_dtype}; T={model.seq_length}, batch {train.global_batch_size}, {train.train_iters} steps"
        + (f"; {run.ranks_here} ranks" if run.ranks_here > 1 else "")
    )
    if any("recompute" in name and value for name, value in vars(model).items()):
        console.print(f"recompute, blocks: {describe_blocks(model)}")
    if run.fitted is not None:
        console.print(describe_fit(run.fitted), highlight=False)
    unit = "bytes" if corpus.training.itemsize == 1 else "tokens"
    console.print(f"corpus: {corpus.name}, {len(corpus.training):,} {unit} (digest {corpus.digest})", markup=False)
