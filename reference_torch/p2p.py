"""Messages between pipeline ranks: named, checked, and bounded in time.

Each message is named after the action that made it (``1F3``: forward of stage 1, microbatch 3) and its step. With gloo
the name and the tensor's shape are the message's tag, so that nothing else can be received in its place: a message
that was dropped, duplicated, or is of another size or step never matches, and the wait for it ends after
``config.pipeline_timeout`` seconds with an error that names it. (Gloo itself aborts the process where a message is
too long for its buffer, and leaves the rest of the buffer as it was where it is too short.) NCCL has no tags and keeps
the order of each pair of ranks instead: there a header goes before every tensor and is checked on arrival, as it is
wherever sequence lengths vary, since it also holds the shape.

Receives are posted before they are needed and sends are not waited for, so that messages travel while ranks compute.
What is sent stays alive until it has left; a thread waits for that.
"""

import datetime
import zlib
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.messages import Message, PipelineError, Program
from reference_torch.pending_sends import PendingSends, cause_of

Shape = tuple[int, ...]

STEPS, MESSAGES, SHAPES = 1 << 5, 1 << 14, 1 << 12
"""Values a tag has room for: 31 bits. Step and message number wrap around, far beyond what can be under way."""
HEADER_LENGTH, MAX_DIMENSIONS, MAX_TENSORS = 16, 8, 8


class P2PCommunicator:
    """One rank's messages to and from its neighbours.

    Args:
        pp_group: the pipeline's ranks, in order.
        config: the model's; type of the tensors, timeout, overlap, variable lengths.
        device: where received tensors lie.
    """

    def __init__(self, pp_group: ProcessGroup, config: TransformerConfig, device: torch.device | str = "cpu") -> None:
        self.config, self.device, self._group = config, torch.device(device), pp_group
        self.rank, self.size = dist.get_rank(pp_group), pp_group.size()
        self.step = -1
        self._ordered = dist.get_backend(pp_group) == "nccl"
        self._announces = config.variable_seq_lengths or self._ordered
        self._numbers: dict[tuple[int, Action], int] = {}
        self._counted: dict[tuple[str, str], int] = {}
        self._posted: dict[Message, list[_Receive]] = {}
        self._channels = self._make_channels() if self._ordered else {}
        self._senders = PendingSends()

    def begin_step(self, program: Program) -> None:
        """Number the messages of a step; every rank begins its steps in the same order."""
        self.step += 1
        self._counted = {}
        self._numbers = {}
        for sender, steps in enumerate(program):
            sent = [step for step in steps if isinstance(step, Message) and step.direction == "SEND"]
            for peer in range(len(program)):
                for number, message in enumerate([message for message in sent if message.peer == peer]):
                    if self.rank in (sender, peer):
                        self._numbers[peer if self.rank == sender else sender, message.produced_by] = number

    def end_step(self) -> None:
        """Wait until everything sent has been received.

        Raises:
            PipelineError: something was not.
        """
        self._senders.wait()
        assert not self._posted, f"received and never used: {', '.join(map(str, self._posted))}"

    def close(self) -> None:
        """End the thread that waits for sends."""
        self._senders.close()

    def dismiss(self) -> None:
        """End the thread once it has no send left to wait for; for whoever gives up and does not wait."""
        self._senders.dismiss()

    def post_receive(self, message: Message, shapes: Sequence[Shape]) -> None:
        """Say that a message may come; does not wait.

        Args:
            message: its receiving end.
            shapes: of its tensors; without effect where shapes are announced.
        """
        self._expect_all(message, shapes)
        if not self.config.overlap_p2p_comm:
            self._complete(message)

    def receive(self, message: Message) -> list[Tensor]:
        """The tensors of a message that was posted; waits for it.

        Raises:
            PipelineError: it did not come in time, its sender is gone, or another one came.
        """
        self._senders.check()
        if self._ordered and self.config.variable_seq_lengths:
            for earlier in takewhile(lambda posted: posted != message, self._posted):
                if earlier.peer == message.peer:
                    self._complete(earlier)
        return self._complete(message, self._posted.pop(message))

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send tensors; returns at once, and keeps what it needs of them until they have left.

        Raises:
            PipelineError: an earlier message was not received in time.
            ValueError: a tensor is of another type than the receiver expects, or there are too many.
        """
        self._depart_all(message, tensors)
        if not self.config.overlap_p2p_comm:
            self._senders.wait()

    # The calls of Megatron-core's communicator: neighbours by the direction of travel, messages counted, receives
    # waited for. For schedules written by hand; the table's executor uses the calls above.

    def recv_forward(self, tensor_shapes: Sequence[Shape], is_first_stage: bool) -> list[Tensor] | None:
        """The next activations from the rank before; None on the first stage."""
        return None if is_first_stage else self._receive_next("F", tensor_shapes)

    def recv_backward(self, tensor_shapes: Sequence[Shape], is_last_stage: bool) -> list[Tensor] | None:
        """The next gradient from the rank after; None on the last stage."""
        return None if is_last_stage else self._receive_next("B", tensor_shapes)

    def send_forward(self, output_tensors: Sequence[Tensor], is_last_stage: bool) -> None:
        """Activations to the rank after; nothing on the last stage."""
        if not is_last_stage:
            self.send(self._next_message("SEND", "F"), output_tensors)

    def send_backward(self, input_tensor_grads: Sequence[Tensor], is_first_stage: bool) -> None:
        """A gradient to the rank before; nothing on the first stage."""
        if not is_first_stage:
            self.send(self._next_message("SEND", "B"), input_tensor_grads)

    def send_forward_recv_backward(
        self, output_tensors: Sequence[Tensor], tensor_shapes: Sequence[Shape], is_last_stage: bool
    ) -> list[Tensor] | None:
        """Both at once: activations to, and the next gradient from, the rank after."""
        return None if is_last_stage else self._exchange("F", output_tensors, "B", tensor_shapes)

    def send_backward_recv_forward(
        self, input_tensor_grads: Sequence[Tensor], tensor_shapes: Sequence[Shape], is_first_stage: bool
    ) -> list[Tensor] | None:
        """Both at once: a gradient to, and the next activations from, the rank before."""
        return None if is_first_stage else self._exchange("B", input_tensor_grads, "F", tensor_shapes)

    def _receive_next(self, kind: str, shapes: Sequence[Shape]) -> list[Tensor]:
        message = self._next_message("RECV", kind)
        self.post_receive(message, shapes)
        return self.receive(message)

    def _exchange(self, sent: str, tensors: Sequence[Tensor], received: str, shapes: Sequence[Shape]) -> list[Tensor]:
        """Neither is waited for before both are under way: the neighbour does the same."""
        message = self._next_message("RECV", received)
        self._expect_all(message, shapes)
        self._depart_all(self._next_message("SEND", sent), tensors)
        came = self.receive(message)
        if not self.config.overlap_p2p_comm:
            self._senders.wait()
        return came

    def _next_message(self, direction: str, kind: str) -> Message:
        number = self._counted.get((direction, kind), 0)
        self._counted[direction, kind] = number + 1
        onward = (kind == "F") == (direction == "SEND")
        stage = self.rank if direction == "SEND" else self.rank + (1 if kind == "B" else -1)
        action = Action("F" if kind == "F" else "B", stage, number)
        message = Message("SEND" if direction == "SEND" else "RECV", action, self.rank + (1 if onward else -1))
        self._numbers[message.peer, action] = 2 * number + (kind == "B")
        return message

    def _expect_all(self, message: Message, shapes: Sequence[Shape]) -> None:
        self._posted[message] = [self._expect(message, place, shape) for place, shape in enumerate(shapes)]

    def _expect(self, message: Message, place: int, shape: Shape) -> "_Receive":
        dtype = getattr(torch, self.config.compute_dtype)
        header = content = None
        if self._announces and not (self._ordered and self.config.variable_seq_lengths):
            # In order, a header cannot be received before the content in front of it, whose size is not known yet.
            header = self._expect_header(message, place)
        if not self.config.variable_seq_lengths:
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            content = self._arrive(message, place, buffer, shape), buffer
        return _Receive(header, content, shape)

    def _expect_header(self, message: Message, place: int) -> tuple[dist.Work, Tensor]:
        buffer = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self.device)
        return self._arrive(message, place, buffer, "header"), buffer

    def _complete(self, message: Message, receives: "list[_Receive] | None" = None) -> list[Tensor]:
        """Wait for a message's tensors; None: it stays posted."""
        tensors = []
        for place, receive in enumerate(self._posted[message] if receives is None else receives):
            tensors.append(self._finish(message, place, receive))
            receive.content = None, tensors[-1]
        return tensors

    def _finish(self, message: Message, place: int, receive: "_Receive") -> Tensor:
        if receive.content is None and receive.header is None:
            receive.header = self._expect_header(message, place)
        if receive.header is not None:
            work, header = receive.header
            self._wait(work, message, receive.shape)
            shape = self._check_header(message, header)
            receive.header = None
            if receive.content is None:
                buffer = torch.empty(shape, dtype=getattr(torch, self.config.compute_dtype), device=self.device)
                receive.content = self._arrive(message, place, buffer, shape), buffer
        assert receive.content is not None, "a receive has a buffer by now"
        work, buffer = receive.content
        if work is not None:
            self._wait(work, message, receive.shape)
        return buffer

    def _wait(self, work: dist.Work, message: Message, shape: Shape) -> None:
        try:
            work.wait(datetime.timedelta(seconds=self.config.pipeline_timeout))
        except RuntimeError as error:
            raise PipelineError(
                f"rank {self.rank}, step {self.step}: expected {message}, {list(shape)} {self.config.compute_dtype}, "
                f"within pipeline_timeout={self.config.pipeline_timeout:g} s, and it did not come ({cause_of(error)}); "
                f"look at what rank {message.peer} says, or raise pipeline_timeout"
            ) from None

    def _arrive(self, message: Message, place: int, buffer: Tensor, shape: Shape | str) -> dist.Work:
        group, peer = self._route(message)
        try:
            work = dist.irecv(buffer, group=group, group_src=peer, tag=self._tag(message, place, shape))
        except RuntimeError as error:
            raise PipelineError(f"rank {self.rank}, step {self.step}: {message} failed: {cause_of(error)}") from None
        assert work is not None, "this rank is in its own pipeline"
        return work

    def _depart_all(self, message: Message, tensors: Sequence[Tensor]) -> None:
        self._senders.check()
        if len(tensors) > MAX_TENSORS:
            raise ValueError(f"tensors: expected at most {MAX_TENSORS} in {message}, got {len(tensors)}")
        for place, tensor in enumerate(tensors):
            if tensor.dtype != getattr(torch, self.config.compute_dtype):
                raise ValueError(
                    f"tensors: expected {self.config.compute_dtype} in {message}, got {tensor.dtype}; stages exchange "
                    "what the model computes in: cast the stage's output"
                )
            content = tensor.detach().contiguous()
            if self._announces:
                self._depart(message, place, self._header(message, content), "header")
            self._depart(message, place, content, tuple(content.shape))

    def _depart(self, message: Message, place: int, content: Tensor, shape: Shape | str) -> None:
        group, peer = self._route(message)
        tag = self._tag(message, place, shape)
        told = f"rank {self.rank}, step {self.step}: expected {message} to be received"

        def post() -> dist.Work | None:
            return dist.isend(content, group=group, group_dst=peer, tag=tag)

        self._senders.add(self._post(post, message), content, told, self.config.pipeline_timeout)

    def _post(self, post: Callable[[], dist.Work | None], message: Message) -> dist.Work | None:
        """Start a send; tests put delays and faults here."""
        try:
            return post()
        except RuntimeError as error:
            raise PipelineError(f"rank {self.rank}, step {self.step}: {message} failed: {cause_of(error)}") from None

    def _tag(self, message: Message, place: int, shape: Shape | str) -> int:
        number = self._numbers[message.peer, message.produced_by] * MAX_TENSORS + place
        checksum = zlib.crc32(repr((str(message.produced_by), self.config.compute_dtype, shape)).encode())
        return ((self.step % STEPS) * MESSAGES + number % MESSAGES) * SHAPES + checksum % SHAPES

    def _header(self, message: Message, content: Tensor) -> Tensor:
        if content.dim() > MAX_DIMENSIONS:
            raise ValueError(f"tensors: expected at most {MAX_DIMENSIONS} dimensions, got shape {tuple(content.shape)}")
        shape = [*content.shape] + [-1] * (MAX_DIMENSIONS - content.dim())
        return torch.tensor([*self._name(message), content.dim(), *shape], dtype=torch.int64, device=self.device)

    def _name(self, message: Message) -> list[int]:
        """What a header says of the message itself: seven numbers."""
        kind, stage, microbatch = message.produced_by
        dtype = zlib.crc32(self.config.compute_dtype.encode())
        return [zlib.crc32(b"diptych"), self.step, ord(kind), stage, microbatch, dtype, 0]

    def _check_header(self, message: Message, header: Tensor) -> Shape:
        *name, dimensions = header[:8].tolist()
        if name != self._name(message):
            step, kind, stage, microbatch = name[1:5]
            came = f"{Action(chr(kind), stage, microbatch)} of step {step}" if 0 < kind < 128 else "something else"  # pyright: ignore[reportArgumentType]
            raise PipelineError(
                f"rank {self.rank}, step {self.step}: expected {message}, got {came}; a message before it was dropped, "
                "duplicated, or made with other settings"
            )
        return tuple(header[8 : 8 + dimensions].tolist())

    def _route(self, message: Message) -> tuple[ProcessGroup, int]:
        """The group a message travels in, and its other end's rank there."""
        if not self._ordered:
            return self._group, message.peer
        pair = (self.rank, message.peer) if message.direction == "SEND" else (message.peer, self.rank)
        channel = self._channels[pair]
        return channel, dist.get_group_rank(channel, dist.get_global_rank(self._group, message.peer))

    def _make_channels(self) -> dict[tuple[int, int], ProcessGroup]:
        """A group for each direction between two ranks: NCCL runs a group's messages one after the other.

        Every process of the job makes the groups of every pipeline, in the same order, as new_group demands.
        """
        own, channels = dist.get_process_group_ranks(self._group), {}
        pipelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pipelines, own)
        pairs = [(a, (a + step) % self.size) for step in (1, -1) for a in range(self.size)]
        for ranks in sorted({tuple(ranks) for ranks in pipelines}):
            for pair in dict.fromkeys(pairs):
                group = dist.new_group([ranks[place] for place in pair], group_desc=str(pair))
                if list(ranks) == own and self.rank in pair:
                    channels[pair] = group
        return channels


class _Receive:
    """A message's tensor on its way: buffers, and what to wait for."""

    def __init__(
        self,
        header: tuple[dist.Work, Tensor] | None,
        content: tuple[dist.Work | None, Tensor] | None,
        shape: Shape,
    ) -> None:
        self.header, self.content, self.shape = header, content, shape
