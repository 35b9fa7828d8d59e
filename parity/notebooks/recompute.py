"""Memory and time of recompute in both backends, for notebook 02."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax.extend.core import Literal
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import jax_impl.recompute as jax_recompute
import reference_torch.hyper_connections
import reference_torch.mlp
import reference_torch.self_attention
import reference_torch.transformer
from diptych.planner.memory import predict_memory
from diptych.plans.config import TransformerConfig
from diptych.plans.model.values import VALUES
from jax_impl.transformer import GPTModel as JaxModel
from parity.figures import INK, ORACLE, STYLES, TORCH, new_figure
from reference_torch import recompute as torch_recompute
from reference_torch.recompute import CheckpointWithoutOutput, MHCBlockRecomputeManager, measure_memory
from reference_torch.recompute.region import Slot, slot_at
from reference_torch.transformer import GPTModel as TorchModel

MIB = 2**20
_SELECTIVE = ("layernorm", "activation", "mlp", "mhc", "mhc+layernorm", "mhc+layernorm+activation")
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    **{mode: {"recompute_granularity": "selective", "recompute_modules": (*mode.split("+"),)} for mode in _SELECTIVE},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Settings of recompute, by name."""
MODEL = TransformerConfig(
    hidden_size=128,
    num_layers=4,
    num_attention_heads=4,
    seq_length=128,
    enable_hyper_connections=True,
    num_residual_streams=4,
    use_flash_attn=True,
    params_dtype="float32",
)
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, MODEL.seq_length))
TARGETS = np.roll(TOKENS, -1, 1)


def without_output(function: Callable[[Tensor], Tensor], first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    """Return second(function(first(x))), and drop the output of the function after forward."""
    checkpoint = CheckpointWithoutOutput()
    y = second(checkpoint.checkpoint(function, first(x)))
    checkpoint.discard_output_and_register_recompute(y)
    return y


VARIANTS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda function, first, second, x: second(function(first(x))),
    "ordinary checkpoint": lambda function, first, second, x: second(
        torch_checkpoint(function, first(x), use_reentrant=False)
    ),
    "without output": without_output,
}
"""Programs that compute second(function(first(x))), by name."""


def saved_activations(name: str) -> tuple[float, bool]:
    """Return what a variant with gelu saves for backward, in activations, and if its gradients are those of "plain"."""
    torch.manual_seed(0)
    first = nn.Linear(256, 1024, bias=False)
    second = nn.Linear(1024, 256, bias=False)
    x = torch.randn(512, 256)

    def gradients(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y.square().sum(), (first.weight, second.weight))

    expected, found = (gradients(VARIANTS[each](gelu, first, second, x)) for each in ("plain", name))
    saved = (
        measure_memory(lambda: VARIANTS[name](gelu, first, second, x), gradients).saved - x.nbytes
    )  # less the result
    return saved / (512 * 1024 * 4), all(map(torch.equal, found, expected))


def describe_storage(tensor: Tensor) -> str:
    """Return a sentence about the storage of an output of a recompute region."""
    slot = slot_at(tensor.untyped_storage()._cdata)
    state = "full" if slot is None or slot.is_full else "empty"
    return f"storage {state}, class {type(tensor).__name__}, shape {tuple(tensor.shape)}"


ABSENT, EMPTY, RESIDENT, REFILLED = range(4)
"""States of a named value: no memory, storage emptied, in memory since forward, computed again."""


class MemoryTimeline:
    """The state of the memory of every named value, at every step of one forward and backward in PyTorch.

    A step is a value that forward computes, the end of forward, or in backward a gradient that arrives or a storage
    that is refilled. Storages are recorded by weak references, so that the record keeps no value alive.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.names: list[str] = []
        self.states: list[list[int]] = []
        """States of the values named so far, at every step."""
        self.bytes: list[int] = []
        """Bytes of the named values in memory, at every step."""
        self.forward_steps = sys.maxsize
        self._storages: list[list[StorageWeakRef]] = []
        self._sizes: list[int] = []
        self._replaying: Iterator[int] = iter(())
        model = TorchModel(config)
        with self._watching():
            loss = model(torch.from_numpy(TOKENS), torch.from_numpy(TARGETS))
            self.forward_steps = len(self.states)
            self._sample()
            loss.backward()
            self._sample()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        checkpoint = MHCBlockRecomputeManager.checkpoint
        name_value = torch_recompute.name_value
        refill = Slot.refill

        def checkpoint_with_places(manager: Any, fn: Callable[..., Any], *args: Any) -> Any:
            places: range | None = None

            def call(*args: Any) -> Any:
                nonlocal places
                if places is not None:  # a replay names the same values again
                    self._replaying = iter(places)
                    return fn(*args)
                start = len(self.names)
                result = fn(*args)
                places = range(start, len(self.names))
                return result

            return checkpoint(manager, call, *args)

        def named(x: Tensor, name: str) -> Tensor:
            storage = StorageWeakRef(name_value(x, name).untyped_storage())
            if len(self.states) > self.forward_steps:
                self._storages[next(self._replaying)].append(storage)
                return x
            self.names.append(name)
            self._sizes.append(x.nbytes)
            self._storages.append([storage])
            x.register_hook(lambda gradient: self._sample())
            self._sample()
            return x

        def refilled(slot: Slot, *memory: Any) -> Any:
            rebound = refill(slot, *memory)
            self._sample()
            return rebound

        with (
            mock.patch.object(Slot, "refill", refilled),
            mock.patch.object(MHCBlockRecomputeManager, "checkpoint", checkpoint_with_places),
            mock.patch.object(reference_torch.mlp, "name_value", named),
            mock.patch.object(reference_torch.self_attention, "name_value", named),
            mock.patch.object(reference_torch.transformer, "name_value", named),
            mock.patch.object(reference_torch.hyper_connections, "name_value", named),
        ):
            yield

    def _sample(self) -> None:
        """Record the state of all values."""
        previous = self.states[-1] if self.states else []
        column = []
        held = {}
        for row, storages in enumerate(self._storages):
            state = ABSENT
            for number, storage in enumerate(storages):
                slot = slot_at(storage.cdata)
                if storage.expired():
                    continue
                if slot is not None and not slot.is_full:
                    state = EMPTY
                    continue
                was_empty = row < len(previous) and previous[row] in (EMPTY, REFILLED)
                state = REFILLED if number or was_empty else RESIDENT
                held[storage.cdata] = self._sizes[row]
                break
            column.append(state)
        self.states.append(column)
        self.bytes.append(sum(held.values()))

    @property
    def table(self) -> np.ndarray:
        """The states of all values, [values, steps]."""
        return np.array([column + [ABSENT] * (len(self.names) - len(column)) for column in self.states]).T


def draw_timelines(timelines: Mapping[str, MemoryTimeline]) -> None:
    """Draw the states of all named values and the sum of their bytes, one column for each timeline."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    figure, axes = new_figure(2, 10.5, rows=2, sharex="col", sharey="row", height_ratios=[4.4, 1])
    colors = ListedColormap(["white", ORACLE, TORCH, INK])
    for column, (mode, timeline) in enumerate(timelines.items()):
        top = axes[column]
        bottom = axes[2 + column]
        middle = timeline.forward_steps
        top.imshow(timeline.table, cmap=colors, vmin=-0.5, vmax=3.5, aspect="auto", interpolation="none")
        top.set_title(mode)
        top.set_yticks(range(len(timeline.names)), timeline.names, fontsize=7)
        heights = np.array(timeline.bytes) / MIB
        bottom.fill_between(np.arange(len(heights)), heights, color=TORCH, step="mid", linewidth=0)
        bottom.set_xticks([middle / 2, (middle + len(heights)) / 2], ["forward", "backward"])
        for axis in (top, bottom):
            axis.grid(False)
            for place in (middle - 0.5, middle + 0.5):
                axis.axvline(place, color=INK, linewidth=0.8)
    axes[2].set_ylabel("named values in memory, MiB")
    handles = [Rectangle((0, 0), 1, 1, color=colors(state)) for state in (RESIDENT, EMPTY, REFILLED)]
    labels = ["in memory since forward", "storage empty", "computed again"]
    figure.legend(handles, labels, loc="outside upper center", ncols=3)


def torch_step(mode: str) -> tuple[Callable[[], Tensor], Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return forward and backward of a step of PyTorch with a mode of MODES."""
    model = TorchModel(replace(MODEL, **MODES[mode]))
    batch = torch.from_numpy(TOKENS), torch.from_numpy(TARGETS)
    parameters = list(model.parameters())
    return lambda: model(*batch), lambda loss: torch.autograd.grad(loss, parameters)


def jax_loss(mode: str) -> tuple[Callable[[nnx.State], jax.Array], nnx.State]:
    """Return the loss of JAX as a function of the parameters, and the parameters, with a mode of MODES."""
    graph, params = nnx.split(JaxModel(replace(MODEL, **MODES[mode])), nnx.Param)
    return lambda params: nnx.merge(graph, params)(jnp.asarray(TOKENS), jnp.asarray(TARGETS)), params


def saved_values() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the named values saved for backward, by backend, mode and name."""
    return {
        "PyTorch": {mode: torch_recompute.residual_report(torch_step(mode)[0]) for mode in MODES},
        "JAX": {mode: jax_recompute.residual_report(*jax_loss(mode)) for mode in MODES},
    }


def unequal_values(saved: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[tuple[str, str]]:
    """Return mode and name of the values that are saved in one backend only, or with other bytes or another dtype."""

    def described(value: Any) -> tuple[int, str] | None:
        return None if value is None else (value.bytes, value.dtype)

    ours = saved["PyTorch"]
    theirs = saved["JAX"]
    keys = [(mode, name) for mode in MODES for name in VALUES]
    return [(mode, name) for mode, name in keys if described(ours[mode].get(name)) != described(theirs[mode].get(name))]


def named_bytes(saved: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """Return the bytes of all named values of each mode."""
    return [sum(value.bytes for value in values.values()) for values in saved.values()]


def draw_saved(saved: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Draw one table of saved KiB for each backend: values in rows, modes in columns."""
    from matplotlib.colors import LinearSegmentedColormap

    names = [name for name in VALUES if any(name in values for values in saved["PyTorch"].values())]
    _, axes = new_figure(2, 5.4, sharey=True)
    for axis, (backend, by_mode) in zip(axes, saved.items(), strict=True):
        rows = [[values[name].bytes if name in values else 0 for values in by_mode.values()] for name in names]
        table = np.array([*rows, named_bytes(by_mode)])
        shade = np.sqrt(table / table[:-1].max()) * (np.arange(len(table)) < len(names))[:, None]
        colors = LinearSegmentedColormap.from_list(backend, ["white", STYLES[backend]["color"]])
        axis.imshow(shade, cmap=colors, vmin=0, vmax=1.15, aspect="auto")
        for i, j in np.ndindex(*table.shape):
            text = f"{table[i, j] / 1024:.0f}" if table[i, j] else "·"
            color = "white" if shade[i, j] > 0.75 else INK
            axis.text(j, i, text, ha="center", va="center", fontsize=8, color=color)
        axis.set_xticks(range(len(MODES)), [mode.replace("+", "+\n") for mode in MODES], rotation=90, fontsize=8)
        axis.set_yticks(range(len(table)), [*names, "total"])
        axis.set_title(f"{backend}: named values saved for backward, KiB")
        axis.grid(False)


class StepMemory(NamedTuple):
    """Memory of a step with one mode, in bytes, and its gradients in both backends."""

    saved: int
    peak: int
    predicted_saved: float
    predicted_peak: float
    residuals: int
    """Bytes that the program of jax.vjp passes from forward to backward, without parameters."""
    temporary: int
    """Temporary memory of the compiled step of JAX."""
    torch_gradients: np.ndarray
    jax_gradients: np.ndarray


def measure_steps() -> tuple[dict[str, StepMemory], dict[tuple[str, str], Callable[[], Any]]]:
    """Return the memory of a step by mode, and the steps themselves, by backend and mode."""
    memory = {}
    steps: dict[tuple[str, str], Callable[[], Any]] = {}
    losses = {mode: jax_loss(mode) for mode in MODES}
    lowered = [jax.jit(jax.value_and_grad(loss)).lower(params) for loss, params in losses.values()]
    with ThreadPoolExecutor(2) as threads:
        compiled = list(threads.map(lambda program: program.compile(), lowered))
    for (mode, (loss, params)), step in zip(losses.items(), compiled, strict=True):
        forward, backward = torch_step(mode)
        steps["PyTorch", mode] = lambda forward=forward, backward=backward: backward(forward())
        steps["JAX", mode] = lambda step=step, params=params: jax.block_until_ready(step(params))
        ours = steps["PyTorch", mode]()
        theirs = jax.tree.leaves(steps["JAX", mode]()[1])
        measured = measure_memory(forward, backward)
        predicted = predict_memory(replace(MODEL, **MODES[mode]), batch=2)
        analysis = step.memory_analysis()
        assert analysis is not None
        memory[mode] = StepMemory(
            measured.saved,
            measured.peak,
            predicted.saved,
            predicted.peak,
            _residual_bytes(loss, params),
            analysis.temp_size_in_bytes,
            np.concatenate([gradient.numpy().ravel() for gradient in ours]),
            np.concatenate([np.ravel(gradient) for gradient in theirs]),
        )
    return memory, steps


def _residual_bytes(loss: Callable[[nnx.State], jax.Array], params: nnx.State) -> int:
    program = jax.make_jaxpr(lambda p: jax.vjp(loss, p)[1])(params).jaxpr
    given = {id(variable) for variable in program.invars}
    passed = {id(v): v.aval for v in program.outvars if not isinstance(v, Literal) and id(v) not in given}
    return sum(aval.size * aval.dtype.itemsize for aval in passed.values())  # pyright: ignore[reportAttributeAccessIssue]


def fastest(steps: Mapping[tuple[str, str], Callable[[], Any]], rounds: int = 4) -> dict[tuple[str, str], float]:
    """Return the shortest CPU time of each step in milliseconds; in every round all steps take turns."""
    milliseconds = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for key, step in steps.items():
            for _ in range(2):
                start = time.process_time()
                step()
                milliseconds[key] = min(milliseconds[key], 1e3 * (time.process_time() - start))
    return milliseconds


def deep_shares(mode: str, num_layers: int) -> tuple[float, float]:
    """Return predicted saved and peak bytes of a deeper model, as shares of those without recompute."""
    deep = replace(MODEL, num_layers=num_layers)
    base, dropped = (predict_memory(replace(deep, **MODES[each]), 2) for each in ("none", mode))
    return dropped.saved / base.saved, dropped.peak / base.peak


def run_hooks(cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[int, str]]:
    """Run parity.notebooks.recompute_hook in one process for each case.

    Args:
        cases: hook tensor and reader.

    Returns:
        Exit status and message, by case.
    """

    def run(case: tuple[str, str]) -> tuple[int, str]:
        command = [sys.executable, "-m", "parity.notebooks.recompute_hook", *reversed(case)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        errors = [line for line in process.stderr.splitlines() if line.startswith("RuntimeError: ")]
        return process.returncode, ", ".join(errors or process.stdout.splitlines()) or "prints nothing"

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(cases, threads.map(run, cases), strict=True))


HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "hidden_states": lambda hidden_states: hidden_states,
    "hidden_states.sum()": lambda hidden_states: hidden_states.sum(),
    "hidden_states.detach()": lambda hidden_states: hidden_states.detach(),
    "torch.ones(3)": lambda hidden_states: torch.ones(3),
}
"""Hook tensors, by name."""


def run_manager(hook: str, is_inside: bool) -> tuple[bool, bool]:
    """Run two operations under MHCBlockRecomputeManager.

    Args:
        hook: hook tensor of HOOKS.
        is_inside: run them inside the manager's context.

    Returns:
        True if the output of the first operation was emptied, and True if all gradients are right.
    """
    torch.manual_seed(0)
    first = nn.Linear(64, 64)
    second = nn.Linear(64, 64)
    parameters = [*first.parameters(), *second.parameters()]
    x = torch.randn(512, 64)

    def run(call: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        inner = call(gelu, first(x))
        return second(call(torch.square, inner)), inner

    expected = torch.autograd.grad(run(lambda fn, x: fn(x))[0].square().sum(), parameters)
    manager = MHCBlockRecomputeManager()
    with manager if is_inside else contextlib.nullcontext():
        hidden_states, inner = run(manager.checkpoint)
        manager.discard_all_outputs_and_register_unified_recompute(HOOKS[hook](hidden_states))
    is_empty = type(inner).__name__ == "DiscardedTensor"
    gradients = torch.autograd.grad(hidden_states.square().sum(), parameters)
    return is_empty, all(map(torch.equal, gradients, expected))
