"""What ranks run in tests of the planner: a step of training, and a count of all that was sent in it."""

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.context.exchange import exchange_options
from diptych.plans.tensor_parallel import rank_config
from parity.ranks import make_trainer
from reference_torch.context_parallel import build_cp_context
from reference_torch.context_parallel.wavefront import finish
from reference_torch.groups import GATHER, SCATTER, wait_for
from reference_torch.recompute import measure_memory
from reference_torch.stage import _replayed_kinds, model_provider, offload_layers
from reference_torch.tensor_parallel import TensorParallel
from reference_torch.transformer import GPTModel
from tests.backends import tiny_corpus
from tests.planner.host_memory import uncounted_host


def count_step(config: TransformerConfig, train: TrainConfig) -> Counter[str]:
    """Bytes this rank hands over in a step, by call and by group; numbers summed alone are left out.

    Of what is gathered, a copy for each other rank, and of a scattered sum the parts of the others; of a sum, twice all
    bytes, of which a ring sends (n - 1) / n.
    """
    trainer = make_trainer(config, train, tiny_corpus())
    groups = trainer._groups
    names = {id(group): name for name, group in groups._asdict().items() if group is not None}
    sent: Counter[str] = Counter()
    scattered = ("reduce_scatter", SCATTER)
    gathered = ("all_gather", GATHER)
    plain = {name: getattr(dist, name) for name in ("isend", "all_reduce", *scattered, *gathered)}

    def counted(call: str, place: int) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            tensor, group = args[place], options["group"]
            assert isinstance(tensor, torch.Tensor)
            others = group.size() - 1
            times = {"isend": 1, "all_reduce": 2}.get(call, others)
            if call != "all_reduce" or tensor.numel() > 1:
                sent[f"{call} {names[id(group)]}"] += tensor.nbytes * times
            return plain[call](*args, **options)

        return wrapped

    for name in plain:
        setattr(dist, name, counted(name, int(name in gathered)))  # the tensor that a rank hands over or receives
    try:
        trainer.train_step(0)
        dist.barrier()
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
    return sent


def let_go(*args: Any) -> None:
    """Wait for an exchange, and until gloo's thread no longer holds what it has gathered."""
    wait_for(*args)
    time.sleep(0.002)


def measure_rank(config: TransformerConfig, batch: int) -> tuple[int, int]:
    """Bytes that a tensor-parallel rank keeps for backward, and the most that it has at any time."""
    model = model_provider(rank_config(config))
    manager = offload_layers([model], config)
    ranks = TensorParallel(dist.group.WORLD, config.sequence_parallel)
    tokens, targets = torch.randint(0, config.vocab_size, (2, batch, config.seq_length))
    parameters = list(model.parameters())

    def forward() -> torch.Tensor:
        return model(tokens, targets, tensor_parallel=ranks)

    def backward(loss: torch.Tensor) -> Any:
        return torch.autograd.grad(loss, parameters)

    with mock.patch("reference_torch.tensor_parallel.wait_for", let_go), uncounted_host():
        backward(forward())  # buffers made on first use
        found = [measure_memory(forward, backward) for _ in range(3)]
    manager.close()
    return min(each.saved for each in found), min(each.peak for each in found)


def measure_part(config: TransformerConfig, batch: int) -> tuple[int, int]:
    """Bytes that the model keeps for backward of this rank's part of some sequences, and the most at any time."""
    model, group, length = GPTModel(replace(config, context_parallel_size=1)), dist.group.WORLD, config.seq_length
    offsets = torch.arange(0, batch * length + 1, length, dtype=torch.int32)
    context = build_cp_context(offsets, group, config.linear_conv_kernel_dim, offsets, **exchange_options(config))
    if context.messages is not None:
        context.messages.replayed_kinds = _replayed_kinds(model.decoder.blocks)  # as in training
    place = torch.arange(batch * length).chunk(context.size)[context.rank]
    tokens, targets = torch.randint(0, config.vocab_size, (2, 1, len(place)))
    arguments = {"samples": (place // length)[None], "positions": place % length, "step": 0, "cp_context": context}
    parameters = list(model.parameters())

    def forward() -> torch.Tensor:
        return model(tokens, targets, **arguments)

    def backward(loss: torch.Tensor) -> Any:
        gradients = torch.autograd.grad(loss, parameters)
        finish(group)
        return gradients

    with ExitStack() as patches:
        for name in ("exchange", "layers", "wavefront", "zigzag"):
            patches.enter_context(mock.patch(f"reference_torch.context_parallel.{name}.wait_for", let_go))
        backward(forward())  # buffers made on first use
        found = [measure_memory(forward, backward) for _ in range(5)]
    return min(each.saved for each in found), min(each.peak for each in found)
