"""Ranks on which something goes wrong, takes its time, or misbehaves."""

import os
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from diptych.plans.checkpoint import CheckpointError
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.data import Corpus
from diptych.plans.schedule.messages import PipelineError
from reference_torch.groups import ProcessGroups, gather, gather_texts, make_mesh, on_first_rank
from reference_torch.p2p import P2PCommunicator
from reference_torch.pipeline import get_forward_backward_func
from reference_torch.train import Trainer
from tests.faults.messages import Fault, Faulty, InOrder
from tests.pipeline.jobs import Case, groups_of, run_case
from tests.pipeline.toy_jobs import toy_data, toy_shapes, toy_step

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
    report = (time.monotonic() - begin, error, outcome)
    with open(f"{folder}/{dist.get_rank()}.part", "wb") as file:
        pickle.dump(report, file)
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


# Ranks that do not meet.


def resume_each(config: TransformerConfig, train: TrainConfig, corpus: Corpus, paths: Sequence[Any]) -> int:
    """Every rank goes on from a path of its own, as if each machine had the folder on its own disk."""
    trainer = Trainer(config, train, corpus, device="cpu", mesh=make_mesh(config))
    return trainer.resume(paths[dist.get_rank()])


def write_with_odd_error() -> tuple[str, str] | None:
    """Raise an error on the first rank that cannot be pickled, and return what every rank raises."""

    class Odd(Exception):
        """A class that other processes cannot import."""

    def write() -> None:
        raise Odd("of the disk")

    try:
        on_first_rank(write, ProcessGroups(pp=dist.group.WORLD))
    except CheckpointError as error:
        return str(error), type(error.__cause__).__name__


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
        gather_texts("", groups)
