"""Execution of one rank's part of a schedule table.

``diptych/plans/schedule/named.py`` decides the order of actions and ``diptych/plans/schedule/messages.py`` the
messages between them; the executor reorders nothing. Sends do not block. With ``overlap_p2p_comm``, a receive is posted
before the action that precedes it starts. B is the full backward; a split backward is I (inputs) and W (weights).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.messages import Message, PipelineError, Program, dependencies, lower, receiver
from reference_torch.p2p import P2PCommunicator, Shape
from reference_torch.pipeline.split_backward import DeferredWeightGradients


@runtime_checkable
class RankStages(Protocol):
    """The computations of a rank's stages, which the executor calls in the order of a schedule.

    A result is what a stage sends to a neighbour: activations to the next stage, or gradients to the previous one. The
    implementation chooses its form; only a result for another rank is encoded as tensors.
    """

    def forward(self, action: Action, received: Any) -> tuple[Any, Any]:
        """Run F of a stage, and return its result and the values that backward needs.

        Args:
            action: the action.
            received: result of the previous stage; None on the first stage.
        """
        ...

    def backward(self, action: Action, saved: Any, received: Any) -> Any:
        """Run B or I of a stage, and return the gradients of the result that it received; None on the first stage.

        Args:
            action: the action.
            saved: values for backward that forward returned for this microbatch.
            received: gradients from the next stage; None on the last stage.
        """
        ...

    def end_backward(self, stage: int) -> None:
        """End the backward of a stage, whose microbatches have all run."""
        ...

    def copy_for_next(self, result: Any) -> Any:
        """Return a result for a stage of the same rank."""
        ...

    def encode(self, action: Action, result: Any) -> Sequence[Tensor]:
        """Return the tensors of the message with the result of an action."""
        ...

    def decode(self, action: Action, tensors: Sequence[Tensor]) -> Any:
        """Return the result of an action of another rank from the tensors of its message."""
        ...

    def message_shapes(self, action: Action) -> Sequence[Shape]:
        """Return the shapes of the tensors in the message with the result of an action."""
        ...

    def release(self, result: Any) -> None:
        """Release the memory of a result of F that is sent; backward does not need it."""
        ...


class Executor:
    """The executor of one step of one rank.

    Args:
        schedule: the table.
        stages: computations of the stages of this rank.
        communicator: communicator of the pipeline; None: the pipeline has one rank.
        trace: list to which every action is appended after it has run.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: RankStages,
        communicator: P2PCommunicator | None,
        trace: list[Action] | None = None,
    ) -> None:
        self._schedule = schedule
        self._stages = stages
        self._communicator = communicator
        self._rank = 0 if communicator is None else communicator.rank
        self._trace = [] if trace is None else trace
        self._saved: dict[tuple[int, int], Any] = {}
        """Values for backward of each forward whose backward has not run, by stage and microbatch."""
        self._results: dict[Action, Any] = {}
        """Results of actions that wait for a send or for another stage of this rank."""
        self._deferred: defaultdict[tuple[int, int], DeferredWeightGradients] = defaultdict(DeferredWeightGradients)
        self._backwards_remaining: defaultdict[int, int] = defaultdict(lambda: schedule.num_microbatches)

    def run(self) -> None:
        """Run all actions and messages of the rank.

        Raises:
            PipelineError: a message did not arrive, or was not received.
        """
        program = _program(self._schedule)
        steps = program[self._rank]
        if self._communicator is not None:
            self._communicator.begin_step(program)
        posted = 0
        for index, step in enumerate(steps):
            posted = self._post_receives(steps, index, posted)
            if isinstance(step, Action):
                self._run(step)
                self._trace.append(step)
            elif step.direction == "SEND":
                self._send(step)
        if self._communicator is not None:
            self._communicator.end_step()

    def _post_receives(self, steps: Sequence[Action | Message], index: int, posted: int) -> int:
        """Post the receives between this step of the program and the next action.

        With overlap, a receive is posted before the action that precedes it starts. Without overlap, it is posted and
        waited for at its own place in the program.

        Args:
            steps: program of the rank.
            index: index of the current step.
            posted: index up to which receives are posted already.

        Returns:
            The index up to which receives are posted now.
        """
        end = index + 1
        if self._communicator is not None and self._communicator.config.overlap_p2p_comm:
            while end < len(steps) and not isinstance(steps[end], Action):
                end += 1
        for step in steps[max(posted, index) : end]:
            if isinstance(step, Message) and step.direction == "RECV":
                assert self._communicator is not None, "messages need another rank"
                self._communicator.post_receive(step, self._stages.message_shapes(step.produced_by))
        return max(posted, end)

    def _run(self, action: Action) -> None:
        """Run one action of one stage and microbatch.

        Raises:
            ValueError: forward changes its input in place.
            PipelineError: another microbatch changed in place a value that backward needs.
            Exception: an error of the stage, with a note that names the action.
        """
        steps: dict[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weight_gradients,
        }
        try:
            steps[action.kind](action)
        except Exception as error:
            explained = _explain(error, action)
            explained.add_note(
                f"rank {self._rank}, {action}: {KIND_NAMES[action.kind]} of stage {action.stage}, "
                f"microbatch {action.microbatch}"
            )
            if explained is error:
                raise
            raise explained from error
        if action.kind in "BW":
            self._backwards_remaining[action.stage] -= 1
            if self._backwards_remaining[action.stage] == 0:
                self._stages.end_backward(action.stage)

    def _forward(self, action: Action) -> None:
        """Run F: receive the input of the stage, run it, and store its result for the next stage and for backward."""
        received = self._take_received(action) if action.stage > 0 else None
        with self._defer_weight_gradients(action):
            result, saved = self._stages.forward(action, received)
        if action.stage + 1 < self._schedule.num_stages:
            self._results[action] = result
        if not self._schedule.forward_only:
            self._saved[action.stage, action.microbatch] = saved

    def _backward(self, action: Action) -> None:
        """Run B or I: receive the gradient of the output, and store that of the input for the previous stage."""
        saved = self._saved.pop((action.stage, action.microbatch))
        received = self._take_received(action) if action.stage + 1 < self._schedule.num_stages else None
        with self._defer_weight_gradients(action):
            result = self._stages.backward(action, saved, received)
        if action.stage > 0:
            self._results[action] = result

    def _weight_gradients(self, action: Action) -> None:
        """Run W: compute the weight gradients that I deferred."""
        self._deferred.pop((action.stage, action.microbatch)).run()

    def _defer_weight_gradients(self, action: Action) -> AbstractContextManager[Any]:
        """Return the context that defers weight gradients if the table splits this backward into I and W."""
        key = action.stage, action.microbatch
        return self._deferred[key] if self._schedule.splits(*key) else nullcontext()

    def _take_received(self, action: Action) -> Any:
        """Return the result that an action needs from a neighbouring stage, of this rank or another."""
        (needed,) = [other for other in dependencies(self._schedule, action) if other.stage != action.stage]
        if self._schedule.rank_of(needed.stage) == self._rank:
            return self._stages.copy_for_next(self._results.pop(needed))
        assert self._communicator is not None, "messages need another rank"
        tensors = self._communicator.receive(Message("RECV", needed, self._schedule.rank_of(needed.stage)))
        return self._stages.decode(needed, tensors)

    def _send(self, message: Message) -> None:
        """Send the result of an action; an activation is released afterwards."""
        assert self._communicator is not None, "messages need another rank"
        assert receiver(self._schedule, message.produced_by) == message.peer, "the message has another receiver"
        result = self._results.pop(message.produced_by)
        self._communicator.send(message, self._stages.encode(message.produced_by, result))
        if message.produced_by.kind == "F":
            self._stages.release(result)


KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
"""Names of the kinds of actions, for error messages."""


def _explain(error: Exception, action: Action) -> Exception:
    """Return an error that explains a PyTorch error in terms of the pipeline, or the error itself."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, RuntimeError) and "leaf Variable that requires grad is being used in an in-place" in text:
        return ValueError(
            f"expected stage {action.stage} not to change the tensor that it received, got an "
            "operation in place on it; write x = x + y, or change a copy, x.clone()"
        )
    if type(error) is RuntimeError and "has been modified by an inplace operation" in text:
        return PipelineError(
            f"{action}: expected values saved for backward unchanged, got one changed in place ({text[:160]}); "
            "other microbatches ran in between: yield new tensors from the data iterator, and write into no buffer "
            "that forward reads"
        )
    return error


@lru_cache(maxsize=32)
def _program(schedule: Schedule) -> Program:
    """Return the program of a table with its messages, which is the same at every step."""
    return lower(schedule)
