"""What the pipeline tests run on ranks: every function here is called on all ranks of a RankPool alike."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.message_faults import Fault, Faulty, InOrder
from plans.actions import Action
from plans.communication import PipelineError
from plans.config import TrainConfig, TransformerConfig
from plans.data import Batch, Corpus
from plans.partition import undivided
from plans.placement import placement_of
from plans.recompute import NO_RECOMPUTE
from reference_torch.groups import ProcessGroups, gather, make_groups, make_mesh, on_first_rank, said_on_all_ranks
from reference_torch.p2p import P2PCommunicator
from reference_torch.pipeline import get_forward_backward_func, get_model, steps
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


def undivided_outcome(case: Case, replicas: int = 1, weights: Sequence[float] | None = None) -> Outcome:
    """Loss and gradients of the whole model on one process, by nothing but autograd.

    Args:
        weights: of each microbatch's mean loss in the step's; None: all alike.
    """
    model = GPTModel(replace(undivided(case.config), **NO_RECOMPUTE))
    losses = []
    for part in microbatches(case, replicas):
        losses.append(model(**arguments_of(part)))
    weights = weights or [1 / len(losses)] * len(losses)
    sum(loss * weight for loss, weight in zip(losses, weights, strict=True)).backward()
    return Outcome([loss.item() for loss in losses], gradients_of(model), [])


def arguments_of(part: Microbatch) -> dict[str, Any]:
    """What a model is told of a microbatch."""
    tokens, targets, starts = (None if x is None else torch.from_numpy(x) for x in part.batch)
    assert tokens is not None
    samples = torch.arange(part.first, part.first + len(tokens))
    told = {"inputs": tokens, "targets": targets, "document_starts": starts}
    return told | {"step": part.step, "samples": samples, "training": part.training}


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
    key = config.pipeline_model_parallel_size, config.untie_embeddings_and_output_weights, placement_of(config)
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


# Stages of other people's making.


class Toy(torch.nn.Module):
    """A stage of one linear map, with as many tensors in as out.

    Args:
        stage: its number; decides the initial values.
        tensors: how many go on to the next stage; of two, the second is made of the first.
    """

    def __init__(self, stage: int, tensors: int = 1) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.tensors = stage, tensors
        self.linear = torch.nn.Linear(4, 4, dtype=torch.float64)

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.entered = input_tensor

    def forward(self, data: torch.Tensor) -> Any:
        entered = data if self.stage == 0 else self.entered
        first, *others = entered if isinstance(entered, list) else [entered]
        out = self.linear(sum(others, first)).exp()
        return out if self.tensors == 1 else [out, out * out, out.sin()][: self.tensors]


class Passing(Toy):
    """A stage that hands on what it was given; its map is of no use."""

    def forward(self, data: torch.Tensor) -> Any:
        return data if self.stage == 0 else self.entered


def toy_data(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(1, 3, 4, dtype=torch.float64, generator=generator) for _ in range(count)]


def toy_step(data_iterator: Iterator[torch.Tensor], model: Toy) -> tuple[Any, Any]:
    """The mean of everything the last stage gives."""

    def reduce(output: Any, non_loss_data: bool = False) -> Any:
        loss = sum(tensor.mean() for tensor in (output if isinstance(output, list) else [output]))
        return {"shape": [*output.shape]} if non_loss_data else (loss, {"loss": loss, "list": [loss]})

    return model(next(data_iterator)), reduce


def toy_shapes(received: list, sent: list, tensors: int) -> tuple[list, list]:
    return [(1, 3, 4)] * tensors, [(1, 3, 4)] * tensors


def toy_outcome(stages: Sequence[Toy], count: int) -> dict[str, np.ndarray]:
    """Gradients of the same stages in one process, by stage and name."""
    for data in toy_data(count):
        passed: Any = data
        for stage in stages:
            stage.set_input_tensor(passed)
            passed = stage(data)
        (toy_step(iter([data]), stages[-1])[1](passed)[0] / count).backward()
    return {f"{i}.{name}": gradient for i, stage in enumerate(stages) for name, gradient in gradients_of(stage).items()}


def run_toy(passing: int | None, tensors: int, config: TransformerConfig, count: int) -> dict[str, np.ndarray]:
    """This rank's gradients, by stage and name, and that the data were left alone."""
    groups = groups_of(config)
    stage = (Passing if groups.pp_rank == passing else Toy)(groups.pp_rank, tensors)
    data = toy_data(count)
    get_forward_backward_func(config)(
        forward_step_func=toy_step,
        data_iterator=iter(data),
        model=stage,
        num_microbatches=count,
        seq_length=3,
        micro_batch_size=1,
        config=config,
        adjust_tensor_shapes_fn=lambda received, sent: toy_shapes(received, sent, tensors),
        pg_collection=groups,
    )
    assert all(torch.equal(a, b) for a, b in zip(data, toy_data(count), strict=True)), "data were overwritten"
    return {f"{groups.pp_rank}.{name}": gradient for name, gradient in gradients_of(stage).items()}


def collect_shapes(config: TransformerConfig, count: int) -> list[Any]:
    """What a last stage returns that gives no loss."""
    groups = groups_of(config)
    with torch.no_grad():
        return get_forward_backward_func(config)(
            forward_step_func=toy_step,
            data_iterator=iter(toy_data(count)),
            model=Toy(groups.pp_rank),
            num_microbatches=count,
            seq_length=3,
            micro_batch_size=1,
            config=config,
            forward_only=True,
            collect_non_loss_data=True,
            adjust_tensor_shapes_fn=lambda received, sent: toy_shapes(received, sent, 1),
            pg_collection=groups,
        )


# 1F1B by hand.


def one_forward_one_backward(config: TransformerConfig, count: int) -> dict[str, np.ndarray]:
    """The loop of Megatron-core's schedule over the communicator's compound calls, and this rank's gradients."""
    groups = groups_of(config)
    rank, size = groups.pp_rank, config.pipeline_model_parallel_size
    first, last = rank == 0, rank == size - 1
    assert groups.pp is not None
    stage, link, data = Toy(rank), P2PCommunicator(groups.pp, config), iter(toy_data(count))
    shapes = [(1, 3, 4)]
    in_flight: list[tuple[Any, Any]] = []
    reports: list[Any] = []

    def forward(entered: Any) -> Any:
        entered = None if entered is None else entered[0].requires_grad_()
        output, _ = steps.forward_step(toy_step, data, stage, count, entered, reports, config, is_last_stage=last)
        in_flight.append((entered, output))
        return output

    def backward(gradient: Any) -> Any:
        entered, output = in_flight.pop(0)
        gradient = steps.backward_step(entered, output, gradient)
        return None if gradient is None else [gradient]

    warmup = min(size - 1 - rank, count)
    for _ in range(warmup):
        output = forward(link.recv_forward(shapes, first))
        link.send_forward([output], last)
        steps.deallocate_output_tensor(output, True)
    entered = link.recv_forward(shapes, first) if count > warmup else None
    for number in range(count - warmup):
        output = forward(entered)
        received = link.send_forward_recv_backward([output], shapes, last)
        if not last:
            steps.deallocate_output_tensor(output, True)
        gradient = backward(received)
        if number + 1 < count - warmup:
            entered = link.send_backward_recv_forward(gradient, shapes, first)
        else:
            link.send_backward(gradient, first)
    for _ in range(warmup):
        link.send_backward(backward(link.recv_backward(shapes, last)), first)
    link.end_step()
    link.close()
    return {f"{rank}.{name}": gradient for name, gradient in gradients_of(stage).items()}


# What is done when.


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


# Faults.


def run_with_fault(
    case: Case, fault: Fault | None, folder: str, kind: str = "Faulty", others: dict[int, Case] | None = None
) -> None:
    """A step on this rank, or another case's where there is one for it; writes what came of it into the folder.

    Ranks write, since one that was killed takes the others' answers to the pool with it.
    """
    groups = groups_of(case.config)
    assert groups.pp is not None
    patient = case._replace(config=replace(case.config, pipeline_timeout=60.0))
    link = {"Faulty": Faulty, "InOrder": InOrder}[kind](groups.pp, patient.config)
    run_case(patient, link)  # nothing is slow the first time any more
    case = (others or {}).get(dist.get_rank(), case)
    link.fault, link.config = fault, case.config
    if fault is not None and (fault.kind, fault.rank) == ("behind by a step", link.rank):
        link.step -= 1
    dist.barrier()
    begin, error, outcome = time.monotonic(), None, None
    try:
        outcome = run_case(case, link)
    except PipelineError as raised:
        error = str(raised)
    told = (time.monotonic() - begin, error, outcome)
    with open(f"{folder}/{dist.get_rank()}.part", "wb") as file:
        pickle.dump(told, file)
    os.rename(f"{folder}/{dist.get_rank()}.part", f"{folder}/{dist.get_rank()}")


# Time.


class Sleeping(torch.nn.Module):
    """A stage that takes its time without using the processor."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.entered = input_tensor

    def forward(self, data: torch.Tensor) -> Any:
        return Sleep.apply(getattr(self, "entered", data), *self.seconds)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x + 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class SlowLink(P2PCommunicator):
    """Every message sets out late; the rank that sends it may compute meanwhile."""

    delay = 0.0

    def _post(self, post: Any, message: Any) -> Any:
        return Late(lambda: super(SlowLink, self)._post(post, message), self.delay)


class Late:
    """What is waited for where a message has not even set out."""

    def __init__(self, post: Any, delay: float) -> None:
        self._post, self._posted = post, threading.Event()
        threading.Timer(delay, self._set_out).start()

    def _set_out(self) -> None:
        self._work = self._post()
        self._posted.set()

    def wait(self, timeout: Any) -> None:
        assert self._posted.wait(timeout.total_seconds())
        self._work.wait(timeout)


def step_seconds(config: TransformerConfig, count: int, times: tuple[float, float, float], steps: int) -> list[float]:
    """Of steps of sleeping stages over a slow link; times of F, B and the link."""
    groups = groups_of(config)
    assert groups.pp is not None
    link, stage, seconds = SlowLink(groups.pp, config), Sleeping(*times[:2]), []
    link.delay = times[2]
    for _ in range(steps + 1):
        dist.barrier()
        begin = time.perf_counter()
        get_forward_backward_func(config)(
            forward_step_func=toy_step,
            data_iterator=iter([x.requires_grad_() for x in toy_data(count)]),
            model=stage,
            num_microbatches=count,
            seq_length=3,
            micro_batch_size=1,
            config=config,
            adjust_tensor_shapes_fn=lambda received, sent: toy_shapes(received, sent, 1),
            p2p_communicator=link,
            pg_collection=groups,
        )
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    link.close()
    return seconds[1:]


# The pool's own.


def rank_number() -> int:
    return dist.get_rank()


def resume_each(config: TransformerConfig, train: TrainConfig, corpus: Corpus, paths: Sequence[Any]) -> int:
    """Every rank goes on from a path of its own, as where a folder lies on each machine's disk."""
    trainer = Trainer(config, train, corpus, device="cpu", mesh=make_mesh(config))
    return trainer.resume(paths[dist.get_rank()])


class Unreadable:
    """An answer that can be sent, but not taken."""

    def __reduce__(self) -> tuple:
        return int, ("unreadable",)


def misbehave(how: str, rank: int) -> int:
    """What a rank may do besides answering."""
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("of rank 1")
        if how == "exit":
            os._exit(7)
        if how == "hang":
            time.sleep(60)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "unpicklable":
            return lambda: None  # type: ignore[return-value]
        if how == "unreadable":
            return Unreadable()  # type: ignore[return-value]
    return dist.get_rank()


def meet_without_first(how: str) -> None:
    """The first rank is gone when all should hand round something that is no message."""
    groups, first = ProcessGroups(pp=dist.group.WORLD), dist.get_rank() == 0
    if how == "write":
        on_first_rank(lambda: os._exit(7), groups)
    elif first:
        os._exit(7)
    elif how == "gather":
        gather({}, groups.pp)
    else:
        said_on_all_ranks("", groups)


def keep_a_pool(path: str) -> None:
    """In a process of its own: a pool whose ranks are busy; writes their process ids into a file."""
    from reference_torch.rank_pool import RankPool

    pool = RankPool(2)
    pool.run("tests.pipeline_jobs:rank_number")
    with open(path + ".part", "w") as file:
        file.write(" ".join(map(str, pool.process_ids())))
    os.rename(path + ".part", path)
    pool.run("tests.pipeline_jobs:misbehave", "hang", 0)


class Wide(torch.nn.Module):
    """A stage whose output is large, and whose backward keeps nothing of that size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.weight = size, torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.entered = input_tensor

    def forward(self, data: torch.Tensor) -> Any:
        return self.weight + torch.zeros(1, 1, self.size, dtype=torch.float64) + getattr(self, "entered", 0.0)


def kept_bytes(config: TransformerConfig, count: int, size: int) -> int:
    """Of a stage's outputs, when its last forward is over."""
    groups = groups_of(config)
    outputs: list[torch.Tensor] = []
    peak = 0

    def step(data_iterator: Any, model: Any) -> Any:
        nonlocal peak
        output = model(next(data_iterator))
        outputs.append(output)
        peak = max(peak, sum(x.untyped_storage().nbytes() for x in outputs))
        return output, lambda out: (out.mean(), out.mean())

    get_forward_backward_func(config)(
        forward_step_func=step,
        data_iterator=iter(toy_data(count)),
        model=Wide(size),
        num_microbatches=count,
        seq_length=3,
        micro_batch_size=1,
        config=config,
        adjust_tensor_shapes_fn=lambda received, sent: ([(1, 1, size)], [(1, 1, size)]),
        pg_collection=groups,
    )
    return peak


def refused_sends(config: TransformerConfig) -> list[str]:
    """What a communicator says of tensors that the other rank does not expect."""
    groups = groups_of(config)
    assert groups.pp is not None
    link, told = P2PCommunicator(groups.pp, config), []
    for tensors in ([torch.ones(1, 3, 4, dtype=torch.float32)], [torch.ones(1, dtype=torch.float64)] * 9):
        try:
            link.send_forward(tensors, is_last_stage=False)
            link.send_backward(tensors, is_first_stage=True)
        except ValueError as error:
            told.append(str(error))
    return told


class Held:
    """What a rank may keep between two calls."""

    def __init__(self, start: int) -> None:
        self.value = start + dist.get_rank()

    def add(self, number: int) -> int:
        self.value += number
        return self.value


def gradients_of_two_steps(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Gradients of a stage after one step, and after the same step again without clearing them."""
    config, groups = case.config, groups_of(case.config)
    stage = get_model(lambda **ends: model_provider(config, **ends), config, groups.pp_rank)
    told = []
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
        told.append(gradients_of(stage))
    return told[0], told[1]


def train_briefly(config: TransformerConfig, steps: int) -> list[float]:
    """Losses of the trainer's own steps."""
    train = TrainConfig(global_batch_size=4, micro_batch_size=1, lr_warmup_iters=0, eval_iters=1)
    text = np.frombuffer(b"a stage may be empty. " * 20, np.uint8) % config.vocab_size
    trainer = Trainer(config, train, Corpus("text", text, text, 0), "cpu", make_mesh(config))
    return [trainer.train_step(step).loss for step in range(steps)] + [trainer.validation_loss()]
