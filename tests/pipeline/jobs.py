"""What the pipeline tests run on ranks: every function here is called on all ranks of a RankPool alike."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.model.data import Batch, Corpus
from diptych.plans.recompute import NO_RECOMPUTE
from diptych.plans.schedule.actions import Action
from reference_torch.groups import ProcessGroups, make_groups, make_mesh
from reference_torch.p2p import P2PCommunicator
from reference_torch.pipeline import get_forward_backward_func, get_model
from reference_torch.stage import Microbatch, PipelineStage, model_provider
from reference_torch.train import Trainer
from reference_torch.transformer import GPTModel

TINY = TransformerConfig(
    hidden_size=8,
    num_layers=4,
    num_attention_heads=2,
    vocab_size=24,
    seq_length=6,
    enable_hyper_connections=True,
    num_residual_streams=2,
    sinkhorn_iterations=3,
    mhc_init_gating_factor=0.5,
    init_method_std=0.3,
    hidden_dropout=0.1,
    params_dtype="float64",
    pipeline_timeout=20.0,
)
"""Every gradient of this model is far from 0, so that each can be compared against its own norm."""


class Case(NamedTuple):
    """One step of the model."""

    config: TransformerConfig
    num_microbatches: int
    size: int = 1
    """Sequences of a microbatch."""
    forward_only: bool = False
    step: int = 3
    lengths: tuple[int, ...] | None = None
    """Tokens of the sequences of each microbatch; None: all that the model takes."""
    tokens_reported: bool = False
    """The reducer returns three values."""
    documents: bool = False
    """Sequences are divided into documents."""


class Outcome(NamedTuple):
    """What one rank has after a step."""

    reports: list[float]
    gradients: dict[str, np.ndarray]
    trace: list[Action]


def microbatches(case: Case, replicas: int = 1) -> list[Microbatch]:
    """The data of all replicas, replica by replica."""
    rng = np.random.default_rng(7)
    lengths = case.lengths or (case.config.seq_length,) * (case.num_microbatches * replicas)
    starts = np.array([[0, 1 + place, 4] for place in range(case.size)], np.int32) if case.documents else None
    return [
        Microbatch(
            Batch(*rng.integers(0, case.config.vocab_size, (2, case.size, length)), starts),
            case.step,
            place * case.size,
            not case.forward_only,
        )
        for place, length in enumerate(lengths)
    ]


def unsharded_outcome(case: Case, replicas: int = 1, weights: Sequence[float] | None = None) -> Outcome:
    """Loss and gradients of the whole model on one process, by nothing but autograd.

    Args:
        weights: of each microbatch's mean loss in the step's; None: all alike.
    """
    model = GPTModel(replace(unsharded(case.config), **NO_RECOMPUTE))
    losses = []
    for part in microbatches(case, replicas):
        losses.append(model(**arguments_of(part)))
    weights = weights or [1 / len(losses)] * len(losses)
    sum(loss * weight for loss, weight in zip(losses, weights, strict=True)).backward()
    return Outcome([loss.item() for loss in losses], gradients_of(model), [])


def arguments_of(part: Microbatch) -> dict[str, Any]:
    """Arguments of the model for a microbatch."""
    tokens, targets, starts = (None if x is None else torch.from_numpy(x) for x in part.batch)
    assert tokens is not None
    samples = torch.arange(part.first, part.first + len(tokens))
    arguments = {"inputs": tokens, "targets": targets, "document_starts": starts}
    return arguments | {"step": part.step, "samples": samples, "training": part.training}


def gradients_of(*models: torch.nn.Module) -> dict[str, np.ndarray]:
    """A copy of every gradient, by name; nothing where there is none. Copies of a tied embedding have equal ones."""
    found: dict[str, np.ndarray] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.numpy().copy()
                np.testing.assert_array_equal(found.setdefault(name, gradient), gradient)
    return found


_groups: dict[tuple[int, bool, str], ProcessGroups] = {}


def groups_of(config: TransformerConfig) -> ProcessGroups:
    """This rank's groups, made once a layout."""
    key = config.pipeline_model_parallel_size, config.untie_embeddings_and_output_weights, config.placement
    if key not in _groups:
        _groups[key] = make_groups(config, make_mesh(config))
    return _groups[key]


def forward_step(data_iterator: Iterator[Microbatch], model: PipelineStage) -> tuple[Any, Any]:
    """One microbatch; the reducer returns the mean loss, twice."""
    return model(**arguments_of(next(data_iterator))), lambda loss: (loss, loss)


def forward_step_with_tokens(data_iterator: Iterator[Microbatch], model: PipelineStage) -> tuple[Any, Any]:
    """As above, but the reducer returns a sum, the number of its tokens, and the mean."""
    part = next(data_iterator)
    count = part.batch.targets.size
    return forward_step(iter([part]), model)[0], lambda loss: (loss * count, torch.tensor(count), loss)


def run_case(
    case: Case, communicator: P2PCommunicator | None = None, trace: list[Any] | None = None, **arguments: Any
) -> Outcome:
    """One step on this rank."""
    config, groups = case.config, groups_of(case.config)
    built = get_model(lambda **ends: model_provider(config, **ends), config, groups.pp_rank)
    stages = built if isinstance(built, list) else [built]
    data = microbatches(case, groups.dp_size)
    own = data[groups.dp_rank * case.num_microbatches : (groups.dp_rank + 1) * case.num_microbatches]
    trace = [] if trace is None else trace
    with torch.set_grad_enabled(not case.forward_only):
        reports = get_forward_backward_func(config)(
            forward_step_func=forward_step_with_tokens if case.tokens_reported else forward_step,
            data_iterator=[iter(own) for _ in stages] if isinstance(built, list) else iter(own),
            model=built,
            num_microbatches=case.num_microbatches,
            seq_length=config.seq_length,
            micro_batch_size=case.size,
            config=config,
            forward_only=case.forward_only,
            p2p_communicator=communicator,
            pg_collection=groups,
            trace=trace,
            **arguments,
        )
    return Outcome([report.item() for report in reports], gradients_of(*stages), trace)


def run_cases(cases: Sequence[Case]) -> list[Outcome]:
    """Steps one after the other."""
    return [run_case(case) for case in cases]


def all_reduces(case: Case) -> tuple[list[int], Outcome]:
    """After how many actions each sum over ranks is begun."""
    begun: list[int] = []
    plain, trace = dist.all_reduce, []

    def counted(*arguments: Any, **settings: Any) -> Any:
        begun.append(len(trace))
        return plain(*arguments, **settings)

    dist.all_reduce = counted
    try:
        return begun, run_case(case, trace=trace)
    finally:
        dist.all_reduce = plain


class Watched(P2PCommunicator):
    """Notes in one list when messages are posted, used and sent, between the actions."""

    events: list[Any]

    def post_receive(self, message: Any, shapes: Any) -> None:
        self.events.append(("post", message))
        super().post_receive(message, shapes)

    def receive(self, message: Any) -> Any:
        self.events.append(("use", message))
        return super().receive(message)

    def send(self, message: Any, tensors: Any) -> None:
        self.events.append(("send", message))
        super().send(message, tensors)


def events(case: Case) -> list[Any]:
    """What a rank does in a step, messages and all."""
    groups = groups_of(case.config)
    assert groups.pp is not None
    link = Watched(groups.pp, case.config)
    link.events = []
    run_case(case, link, trace=link.events)
    return link.events


def repeated_steps(case: Case, count: int) -> list[Outcome]:
    """Steps with one communicator, each from new models."""
    groups = groups_of(case.config)
    assert groups.pp is not None
    link = P2PCommunicator(groups.pp, case.config)
    outcomes = [run_case(case._replace(step=step), link) for step in range(count)]
    link.close()
    return outcomes


def gradients_of_two_steps(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Gradients of a stage after one step, and after the same step again without clearing them."""
    config, groups = case.config, groups_of(case.config)
    stage = get_model(lambda **ends: model_provider(config, **ends), config, groups.pp_rank)
    gradients = []
    for _ in range(2):
        get_forward_backward_func(config)(
            forward_step_func=forward_step_with_tokens if case.tokens_reported else forward_step,
            data_iterator=iter(microbatches(case)),
            model=stage,
            num_microbatches=case.num_microbatches,
            seq_length=config.seq_length,
            micro_batch_size=case.size,
            config=config,
            pg_collection=groups,
        )
        gradients.append(gradients_of(stage))
    return gradients[0], gradients[1]


def train_briefly(config: TransformerConfig, steps: int) -> list[float]:
    """Losses of the trainer's own steps."""
    train = TrainConfig(global_batch_size=4, micro_batch_size=1, lr_warmup_iters=0, eval_iters=1)
    text = np.frombuffer(b"a stage may be empty. " * 20, np.uint8) % config.vocab_size
    trainer = Trainer(config, train, Corpus("text", text, text, 0), "cpu", make_mesh(config))
    return [trainer.train_step(step).loss for step in range(steps)] + [trainer.validation_loss()]
