"""What can go wrong with one message between pipeline ranks, done to a rank's real communicator.

Used by the tests of single steps and by the fault-injection tests (tests/faults/runner.py), which trains.
"""

import os
import signal
import time
from typing import Any, NamedTuple

import torch

from diptych.plans.config import TransformerConfig
from reference_torch.p2p import P2PCommunicator


class Fault(NamedTuple):
    """Something that happens to one message, or to the rank that sends it."""

    kind: str
    rank: int = 0
    action: str = "0F1"
    """Whose message, as Action writes it."""
    seconds: float = 0.0
    step: int | None = None
    """The communicator's; None: every step."""


class Faulty(P2PCommunicator):
    """Does to the messages it sends what the fault says."""

    fault: Fault | None = None

    def strike(self) -> None:
        """Called just before the fault happens."""

    def send(self, message: Any, tensors: Any) -> None:
        super().send(message, tensors)
        if self.fault is not None and self.fault.kind == "duplicated" and self._struck(message):
            self.strike()
            super().send(message, tensors)

    def _struck(self, message: Any) -> bool:
        fault = self.fault
        if fault is None or fault.step not in (None, self.step):
            return False
        return (self.rank, str(message.produced_by)) == (fault.rank, fault.action)

    def _send_one(self, message: Any, place: int, content: torch.Tensor, shape: Any) -> None:
        fault = self.fault
        if fault is None or fault.kind == "duplicated" or not self._struck(message):
            super()._send_one(message, place, content, shape)
            return
        self.strike()
        if fault.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "delayed":
            time.sleep(fault.seconds)
            super()._send_one(message, place, content, shape)
        elif fault.kind in ("longer", "shorter"):  # and said to be so, as by a rank with other settings
            content = torch.cat([content, content], 1) if fault.kind == "longer" else content[:, 1:].contiguous()
            super()._send_one(message, place, content, tuple(content.shape))
        elif fault.kind == "longer than it says":
            super()._send_one(message, place, torch.cat([content, content], 1), shape)
        elif fault.kind == "late of a step":
            self.step -= 1
            super()._send_one(message, place, content, shape)
            self.step += 1
        elif fault.kind == "named as the next microbatch's":
            action = message.produced_by
            following = message._replace(produced_by=action._replace(microbatch=action.microbatch + 1))
            super()._send_one(following, place, content, shape)
        elif fault.kind == "not a number":
            super()._send_one(message, place, torch.full_like(content, float("nan")), shape)
        else:
            assert fault.kind == "dropped", fault.kind


class InOrder(Faulty):
    """Messages without tags, in the order of each pair of ranks, behind headers: what NCCL does, by gloo."""

    def __init__(self, group: Any, config: TransformerConfig, device: torch.device | str = "cpu") -> None:
        super().__init__(group, config, device)
        self._ordered = True
        self._channels = self._make_channels()

    def _tag(self, message: Any, place: int, shape: Any) -> int:
        return 0
