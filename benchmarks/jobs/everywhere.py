"""Models of transformers for benchmarks/everywhere.py, and the pipelines of them that its ranks execute."""

import math
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

from reference_torch.pipeline import PipelineExecutor, split_batch, split_model
from reference_torch.recompute import measure_memory

transformers.logging.set_verbosity_error()

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
PATCH = 8
CLASSES = 16
SCHEDULES = {
    "1f1b": (Schedule1F1B, 1),
    "interleaved-zb1p": (ScheduleInterleavedZeroBubble, 2),
    "zb-v": (ScheduleZBVZeroBubble, 2),
}
"""Schedule of torch.distributed.pipelining and stages per rank, by the name of the schedule here."""


class Sizes(NamedTuple):
    """Sizes of a model and its batch."""

    hidden: int = 256
    blocks: int = 6
    heads: int = 4
    length: int = 256
    """Tokens of a sequence, or patches of an image."""
    batch: int = 2
    vocabulary: int = 1024


class Subject(NamedTuple):
    """A model of transformers, and the names of its parts."""

    make: Callable[[Sizes], nn.Module]
    blocks: str
    """Name of the list of blocks."""
    recomputed: tuple[str, ...]
    """Norms and activation function of a block."""


def _gpt2(sizes: Sizes) -> nn.Module:
    width = {"vocab_size": sizes.vocabulary, "n_embd": sizes.hidden, "n_positions": sizes.length}
    depth = {"n_layer": sizes.blocks, "n_head": sizes.heads, "tie_word_embeddings": False}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**width, **depth, **dropout, use_cache=False))


def _llama(sizes: Sizes) -> nn.Module:
    width = {"vocab_size": sizes.vocabulary, "hidden_size": sizes.hidden, "intermediate_size": 3 * sizes.hidden}
    depth = {"num_hidden_layers": sizes.blocks, "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**width, **depth, use_cache=False))


def _vit(sizes: Sizes) -> nn.Module:
    width = {"hidden_size": sizes.hidden, "intermediate_size": 4 * sizes.hidden, "num_labels": CLASSES}
    depth = {"num_hidden_layers": sizes.blocks, "num_attention_heads": sizes.heads}
    image = {"image_size": PATCH * math.isqrt(sizes.length), "patch_size": PATCH}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**width, **depth, **image))


SUBJECTS = {
    "GPT-2": Subject(_gpt2, "transformer.h", ("ln_1", "ln_2", "mlp.act")),
    "Llama": Subject(_llama, "model.layers", ("input_layernorm", "post_attention_layernorm", "mlp.act_fn")),
    "ViT": Subject(_vit, "vit.layers", ("layernorm_before", "layernorm_after", "mlp.activation_fn")),
}
"""Models without dropout and without tied weights, with PyTorch's fused attention."""


def build(name: str, sizes: Sizes) -> nn.Module:
    """Return a model in training mode; each call returns equal weights."""
    torch.manual_seed(0)
    return SUBJECTS[name].make(sizes).train()


def blocks_of(name: str, model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model."""
    return [*model.get_submodule(SUBJECTS[name].blocks).children()]


def data_of(name: str, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return the inputs and the labels of a batch."""
    generator = torch.Generator().manual_seed(1)
    if name == "ViT":
        side = PATCH * math.isqrt(sizes.length)
        images = torch.randn(sizes.batch, 3, side, side, generator=generator)
        return images, torch.randint(CLASSES, (sizes.batch,), generator=generator)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """Return the mean loss of an output of a model, or of a stage that PyTorch's tracer has made."""
    logits = output if isinstance(output, Tensor) else output[0]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients by name, unsharded if fully_shard has divided them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for name, g in found.items()}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of gradients.

    The difference of a parameter is relative to the largest element of its gradient, or to a thousandth of the largest
    element of all gradients if that is larger, because some gradients are zero up to rounding.

    Args:
        found: gradients by name.
        expected: gradients of the same parameters, or of more.
    """
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    return max(
        float((gradient - expected[name]).abs().max()) / max(float(expected[name].abs().max()), floor)
        for name, gradient in found.items()
    )


class PipelineTimes(NamedTuple):
    """Measurements of one rank, of this project and of torch.distributed.pipelining."""

    seconds: tuple[list[float], list[float]]
    cpu_seconds: tuple[list[float], list[float]]
    peaks: tuple[int, int]
    """Peak bytes above parameters, from the construction to the end of the second step."""
    differences: tuple[float, float]
    """Largest relative difference of a gradient from the single-device model."""
    parameters: tuple[int, int]
    """Number of parameters whose gradients were compared."""


class _Ours:
    """A pipeline of this project."""

    def __init__(self, name: str, sizes: Sizes, schedule: str, num_microbatches: int) -> None:
        self._model = build(name, sizes)
        self.data, self.labels = (split_batch(each, num_microbatches) for each in data_of(name, sizes))
        cuts, places = _cuts(name, sizes, schedule)
        stages = split_model(self._model, cuts, example_args=(self.data[0],))
        self._make = partial(PipelineExecutor, stages, schedule, num_microbatches, loss_of, timeout=60.0)
        self._own = [stage for n, stage in enumerate(stages) if places[n] == dist.get_rank()]

    def start(self) -> None:
        """Make the executor."""
        self.executor = self._make()

    def zero_gradients(self) -> None:
        """Remove the gradients."""
        self._model.zero_grad()

    def step(self) -> None:
        """Run one step."""
        self.executor.step(self.data, self.labels)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's stages."""
        return {name: gradient for stage in self._own for name, gradient in gradients_of(stage).items()}


class _Theirs:
    """A pipeline of torch.distributed.pipelining, cut at the same places.

    Args:
        name: name of the model.
        sizes: its sizes.
        schedule: name of the schedule in this project.
        num_microbatches: microbatches of a step.
        traced: if True, PyTorch's ``pipeline`` cuts the model; otherwise the stages are written by hand.
    """

    def __init__(self, name: str, sizes: Sizes, schedule: str, num_microbatches: int, traced: bool) -> None:
        self._model = model = build(name, sizes)
        self.data, self.labels = data_of(name, sizes)
        cuts, places = _cuts(name, sizes, schedule)
        numbers = [n for n, place in places.items() if place == dist.get_rank()]
        self._is_first, self._is_last = 0 in numbers, len(cuts) in numbers
        cpu = torch.device("cpu")
        if traced:
            example = split_batch(self.data, num_microbatches)[0]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch.export, about its own functions
                pipe = pipeline(model, (example,), split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING))
            parts = [pipe.get_stage_module(n) for n in numbers]
            self._model = nn.ModuleList(parts)
            make = [partial(pipe.build_stage, n, cpu) for n in numbers]
        else:
            parts = [HandStage(name, model, n, len(places)) for n in numbers]
            make = [partial(PipelineStage, part, n, len(places), cpu) for part, n in zip(parts, numbers, strict=True)]
        self._names = {id(p): name for name, p in model.named_parameters()}
        kind, per_rank = SCHEDULES[schedule]

        def make_schedule() -> Any:
            stages = [make_stage() for make_stage in make]
            return kind(stages if per_rank > 1 else stages[0], num_microbatches, loss_fn=loss_of)

        self._make = make_schedule
        self._parts = parts

    def start(self) -> None:
        """Make the stages and the schedule."""
        self.schedule = self._make()

    def zero_gradients(self) -> None:
        """Remove the gradients."""
        self._model.zero_grad()

    def step(self) -> None:
        """Run one step."""
        inputs = (self.data,) if self._is_first else ()
        self.schedule.step(*inputs, target=self.labels if self._is_last else None, return_outputs=False)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's stages by the names of the model."""
        found = {}
        for part in self._parts:
            parameters = dict(part.named_parameters())
            found |= {self._names.get(id(parameters[n]), n): g for n, g in gradients_of(part).items()}
        return found


class HandStage(nn.Module):
    """A stage as users of PipelineStage write it: blocks, with the embeddings before or the head after them.

    Args:
        name: name of the model, GPT-2 or Llama.
        model: the model, whose submodules the stage uses.
        number: number of the stage.
        count: number of stages.
    """

    def __init__(self, name: str, model: Any, number: int, count: int) -> None:
        super().__init__()
        body = model.base_model
        blocks = blocks_of(name, model)
        self.blocks = nn.ModuleList(blocks[len(blocks) * number // count : len(blocks) * (number + 1) // count])
        self.tokens = model.get_input_embeddings() if number == 0 else None
        self.positions = body.wpe if number == 0 and name == "GPT-2" else None
        self.rotary = body.rotary_emb if name == "Llama" else None
        self.norm = (body.ln_f if name == "GPT-2" else body.norm) if number == count - 1 else None
        self.head = model.lm_head if number == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens or the output of the previous stage to the input of the next stage, or to logits."""
        places = torch.arange(x.shape[1])[None]
        x = x if self.tokens is None else self.tokens(x)
        x = x if self.positions is None else x + self.positions(places)
        options = {} if self.rotary is None else {"position_embeddings": self.rotary(x, places)}
        for block in self.blocks:
            x = block(x, **options)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def _cuts(name: str, sizes: Sizes, schedule: str) -> tuple[list[str], dict[int, int]]:
    """Return the names of the blocks with which stages begin, and the rank of each stage."""
    ranks = dist.get_world_size()
    count = ranks * SCHEDULES[schedule][1]
    cuts = [f"{SUBJECTS[name].blocks}.{sizes.blocks * n // count}" for n in range(1, count)]
    turned = schedule == "zb-v"
    return cuts, {n: n % ranks if n < ranks or not turned else 2 * ranks - 1 - n for n in range(count)}


def compare_pipelines(
    name: str, sizes: Sizes, schedule: str, num_microbatches: int, rounds: int, traced: bool
) -> PipelineTimes:
    """Return the measurements of this rank; the steps of both pipelines take turns.

    Args:
        name: name of the model.
        sizes: its sizes.
        schedule: name of the schedule.
        num_microbatches: microbatches of a step.
        rounds: measured steps of each pipeline.
        traced: if True, PyTorch's ``pipeline`` cuts its model.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {CORES[dist.get_rank() % len(CORES)]})
    expected = _unsharded(name, sizes, num_microbatches)
    pair = [
        _Ours(name, sizes, schedule, num_microbatches),
        _Theirs(name, sizes, schedule, num_microbatches, traced),
    ]
    peaks, differences, counts = [], [], []
    for each in pair:
        peaks.append(measure_memory(partial(_first_steps, each), lambda _: None).peak)
        found = each.gradients()
        differences.append(difference(found, expected))
        counts.append(len(found))
    seconds: tuple[list[float], list[float]] = ([], [])
    cpu_seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for each, times, cpu_times in zip(pair, seconds, cpu_seconds, strict=True):
            each.zero_gradients()
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            each.step()
            cpu_times.append(time.process_time() - cpu_start)
            dist.barrier()
            times.append(time.perf_counter() - start)
    pair[0].executor.close()
    return PipelineTimes(seconds, cpu_seconds, tuple(peaks), tuple(differences), tuple(counts))


def _unsharded(name: str, sizes: Sizes, num_microbatches: int) -> dict[str, Tensor]:
    """Return the gradients of the same microbatches through the single-device model."""
    model = build(name, sizes)
    for inputs, labels in zip(*(split_batch(each, num_microbatches) for each in data_of(name, sizes)), strict=True):
        (loss_of(model(inputs).logits, labels) / num_microbatches).backward()
    return gradients_of(model)


def _first_steps(each: Any) -> Tensor:
    """Run the first two steps, whose memory is measured."""
    each.start()
    for _ in range(2):
        each.zero_gradients()
        each.step()
    return torch.zeros(())
