"""Messages between pipeline ranks, with names, checks and timeouts.

Each message has the name of the action that produced it (``1F3``: forward of stage 1, microbatch 3) and of its step.
With gloo, the tag of a message is computed from its name and shape, so no other message can match it. If a message is
dropped, duplicated, or has another size or step, the receive ends after ``config.pipeline_timeout`` seconds with an
error that names it. (Gloo itself aborts the process if a message is longer than its buffer, and leaves the rest of the
buffer unchanged if it is shorter.) NCCL has no tags but keeps the order of messages between two ranks. There, a header
precedes every tensor and is checked on arrival. A header, which contains the shape, is also sent if sequence lengths
vary.

Receives are posted early and sends do not block, so that communication overlaps with computation. A thread waits for
the sends and keeps the tensors alive until they are sent.
"""

import datetime
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.messages import Message, PipelineError, Program
from reference_torch.pending_sends import PendingSends, cause_of

Shape = tuple[int, ...]

# A tag has 31 bits. Step and message number wrap around only after all pending messages.
STEPS = 1 << 5
"""Number of values of the step in a tag."""
MESSAGES = 1 << 14
"""Number of values of the message number in a tag."""
SHAPES = 1 << 12
"""Number of values of the checksum of name, dtype and shape in a tag."""
HEADER_LENGTH = 16
"""Elements of a header."""
MAX_DIMENSIONS = 8
"""Largest number of dimensions that a header can describe."""
MAX_TENSORS = 8
"""Largest number of tensors in a message."""


@runtime_checkable
class TransportSettings(Protocol):
    """The settings that a communicator reads; a TransformerConfig has them."""

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype of all tensors."""
        ...

    @property
    def pipeline_timeout(self) -> float:
        """Seconds to wait for a message."""
        ...

    @property
    def overlap_p2p_comm(self) -> bool:
        """True if sends and receives overlap with computation."""
        ...

    @property
    def variable_seq_lengths(self) -> bool:
        """True if the receiver does not know the shapes of messages."""
        ...


class P2PCommunicator:
    """The communication of a rank with its neighbours in the pipeline.

    Args:
        pp_group: ranks of the pipeline, in order.
        config: dtype, timeout, overlap and variable lengths; may be replaced between steps, on all ranks alike.
        device: device of received tensors.
    """

    def __init__(self, pp_group: ProcessGroup, config: TransportSettings, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        self._group = pp_group
        self.rank = dist.get_rank(pp_group)
        self.size = pp_group.size()
        self.step = -1
        self._ordered = dist.get_backend(pp_group) == "nccl"
        self._numbers: dict[tuple[int, Action], int] = {}
        self._counted: dict[tuple[str, str], int] = {}
        self._posted: dict[Message, list[_Receive]] = {}
        self._channels = self._make_channels() if self._ordered else {}
        self._senders = PendingSends()

    @property
    def _sends_headers(self) -> bool:
        return self.config.variable_seq_lengths or self._ordered

    def begin_step(self, program: Program) -> None:
        """Assign numbers to the messages of a step; every rank begins its steps in the same order.

        Args:
            program: actions and messages of all ranks.
        """
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
        """Wait until all sent messages have been received.

        Raises:
            PipelineError: a message was not received in time.
        """
        self._senders.wait()
        assert not self._posted, f"received and never used: {', '.join(map(str, self._posted))}"

    def close(self) -> None:
        """End the thread that waits for sends."""
        self._senders.close()

    def dismiss(self) -> None:
        """End the thread after its last send, without waiting for it; used after an error."""
        self._senders.dismiss()

    def post_receive(self, message: Message, shapes: Sequence[Shape]) -> None:
        """Post the receives of a message; with overlap, this does not block.

        Args:
            message: the message to receive.
            shapes: shapes of its tensors; ignored if messages contain their shapes.
        """
        self._expect_all(message, shapes)
        if not self.config.overlap_p2p_comm:
            self._complete(message)

    def receive(self, message: Message) -> list[Tensor]:
        """Wait for a posted message and return its tensors.

        Raises:
            PipelineError: the message did not arrive in time, its sender has ended, or another message arrived.
        """
        self._senders.check()
        if self._ordered and self.config.variable_seq_lengths:
            for earlier in takewhile(lambda posted: posted != message, self._posted):
                if earlier.peer == message.peer:
                    self._complete(earlier)
        return self._complete(message, self._posted.pop(message))

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send tensors; with overlap, this does not block.

        Args:
            message: the message to send.
            tensors: its tensors, which stay alive until they are sent.

        Raises:
            PipelineError: an earlier message was not received in time.
            ValueError: a tensor has another dtype than the receiver expects, or there are too many tensors.
        """
        self._send_all(message, tensors)
        if not self.config.overlap_p2p_comm:
            self._senders.wait()

    # The methods of Megatron-core's communicator, for schedules written by hand: they address neighbours by direction,
    # count messages, and block on receives. The executor of schedule tables uses the methods above.

    def recv_forward(self, tensor_shapes: Sequence[Shape], is_first_stage: bool) -> list[Tensor] | None:
        """Receive the next activations from the previous rank; return None on the first stage."""
        return None if is_first_stage else self._receive_next("F", tensor_shapes)

    def recv_backward(self, tensor_shapes: Sequence[Shape], is_last_stage: bool) -> list[Tensor] | None:
        """Receive the next gradients from the next rank; return None on the last stage."""
        return None if is_last_stage else self._receive_next("B", tensor_shapes)

    def send_forward(self, output_tensors: Sequence[Tensor], is_last_stage: bool) -> None:
        """Send activations to the next rank; do nothing on the last stage."""
        if not is_last_stage:
            self.send(self._next_message("SEND", "F"), output_tensors)

    def send_backward(self, input_tensor_grads: Sequence[Tensor], is_first_stage: bool) -> None:
        """Send gradients to the previous rank; do nothing on the first stage."""
        if not is_first_stage:
            self.send(self._next_message("SEND", "B"), input_tensor_grads)

    def send_forward_recv_backward(
        self, output_tensors: Sequence[Tensor], tensor_shapes: Sequence[Shape], is_last_stage: bool
    ) -> list[Tensor] | None:
        """Send activations to the next rank and receive gradients from it at the same time."""
        return None if is_last_stage else self._exchange("F", output_tensors, "B", tensor_shapes)

    def send_backward_recv_forward(
        self, input_tensor_grads: Sequence[Tensor], tensor_shapes: Sequence[Shape], is_first_stage: bool
    ) -> list[Tensor] | None:
        """Send gradients to the previous rank and receive activations from it at the same time."""
        return None if is_first_stage else self._exchange("B", input_tensor_grads, "F", tensor_shapes)

    def _receive_next(self, kind: str, shapes: Sequence[Shape]) -> list[Tensor]:
        """Receive the next message of a kind, F for activations or B for gradients."""
        message = self._next_message("RECV", kind)
        self.post_receive(message, shapes)
        return self.receive(message)

    def _exchange(self, sent: str, tensors: Sequence[Tensor], received: str, shapes: Sequence[Shape]) -> list[Tensor]:
        """Start a receive and a send before waiting for either, as the neighbour does."""
        message = self._next_message("RECV", received)
        self._expect_all(message, shapes)
        self._send_all(self._next_message("SEND", sent), tensors)
        tensors_received = self.receive(message)
        if not self.config.overlap_p2p_comm:
            self._senders.wait()
        return tensors_received

    def _next_message(self, direction: str, kind: str) -> Message:
        """Return the next message of a direction and kind, counted per step, and assign its number."""
        number = self._counted.get((direction, kind), 0)
        self._counted[direction, kind] = number + 1
        is_to_next = (kind == "F") == (direction == "SEND")
        stage = self.rank if direction == "SEND" else self.rank + (1 if kind == "B" else -1)
        action = Action("F" if kind == "F" else "B", stage, number)
        message = Message("SEND" if direction == "SEND" else "RECV", action, self.rank + (1 if is_to_next else -1))
        self._numbers[message.peer, action] = 2 * number + (kind == "B")
        return message

    def _expect_all(self, message: Message, shapes: Sequence[Shape]) -> None:
        """Post the receives of all tensors of a message."""
        self._posted[message] = [self._expect(message, index, shape) for index, shape in enumerate(shapes)]

    def _expect(self, message: Message, index: int, shape: Shape) -> "_Receive":
        """Post the receives of one tensor: its header if headers are sent, and its content if the shape is known."""
        dtype = getattr(torch, self.config.compute_dtype)
        header = None
        content = None
        if self._sends_headers and not (self._ordered and self.config.variable_seq_lengths):
            # With NCCL, messages arrive in order, and the size of the previous content may not be known yet.
            header = self._expect_header(message, index)
        if not self.config.variable_seq_lengths:
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            content = self._post_one(message, index, buffer, shape), buffer
        return _Receive(header, content, shape)

    def _expect_header(self, message: Message, index: int) -> tuple[dist.Work, Tensor]:
        """Post the receive of the header of one tensor."""
        buffer = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self.device)
        return self._post_one(message, index, buffer, "header"), buffer

    def _complete(self, message: Message, receives: "list[_Receive] | None" = None) -> list[Tensor]:
        """Wait for the tensors of a message; without ``receives``, the message stays posted."""
        tensors = []
        for index, receive in enumerate(self._posted[message] if receives is None else receives):
            tensors.append(self._finish(message, index, receive))
            receive.content = None, tensors[-1]
        return tensors

    def _finish(self, message: Message, index: int, receive: "_Receive") -> Tensor:
        """Wait for one tensor, check its header, and return it."""
        if receive.content is None and receive.header is None:
            receive.header = self._expect_header(message, index)
        if receive.header is not None:
            work, header = receive.header
            self._wait(work, message, receive.shape)
            shape = self._check_header(message, header)
            receive.header = None
            if receive.content is None:
                buffer = torch.empty(shape, dtype=getattr(torch, self.config.compute_dtype), device=self.device)
                receive.content = self._post_one(message, index, buffer, shape), buffer
        assert receive.content is not None, "a receive has no buffer"
        work, buffer = receive.content
        if work is not None:
            self._wait(work, message, receive.shape)
        return buffer

    def _wait(self, work: dist.Work, message: Message, shape: Shape) -> None:
        """Wait for a receive, or raise a PipelineError that names the message."""
        try:
            work.wait(datetime.timedelta(seconds=self.config.pipeline_timeout))
        except RuntimeError as error:
            raise PipelineError(
                f"rank {self.rank}, step {self.step}: expected {message}, {list(shape)} {self.config.compute_dtype}, "
                f"within pipeline_timeout={self.config.pipeline_timeout:g} s, but it did not arrive "
                f"({cause_of(error)}); see the output of rank {message.peer}, or raise pipeline_timeout"
            ) from None

    def _post_one(self, message: Message, index: int, buffer: Tensor, shape: Shape | str) -> dist.Work:
        """Start to receive a header or a content into a buffer."""
        group, peer = self._route(message)
        try:
            work = dist.irecv(buffer, group=group, group_src=peer, tag=self._tag(message, index, shape))
        except RuntimeError as error:
            raise PipelineError(f"rank {self.rank}, step {self.step}: {message} failed: {cause_of(error)}") from None
        assert work is not None, "this rank is in its own pipeline"
        return work

    def _send_all(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Check the tensors of a message and start to send them."""
        self._senders.check()
        if len(tensors) > MAX_TENSORS:
            raise ValueError(f"tensors: expected at most {MAX_TENSORS} in {message}, got {len(tensors)}")
        for index, tensor in enumerate(tensors):
            if tensor.dtype != getattr(torch, self.config.compute_dtype):
                raise ValueError(
                    f"tensors: expected {self.config.compute_dtype} in {message}, got {tensor.dtype}; stages exchange "
                    "what the model computes in: cast the stage's output"
                )
            content = tensor.detach().contiguous()
            if self._sends_headers:
                self._send_one(message, index, self._header(message, content), "header")
            self._send_one(message, index, content, tuple(content.shape))

    def _send_one(self, message: Message, index: int, content: Tensor, shape: Shape | str) -> None:
        """Start to send a header or a content."""
        group, peer = self._route(message)
        tag = self._tag(message, index, shape)
        expected = f"rank {self.rank}, step {self.step}: expected {message} to be received"

        def post() -> dist.Work | None:
            return dist.isend(content, group=group, group_dst=peer, tag=tag)

        self._senders.add(self._post(post, message), content, expected, self.config.pipeline_timeout)

    def _post(self, post: Callable[[], dist.Work | None], message: Message) -> dist.Work | None:
        """Start a send; tests override this method to insert delays and faults."""
        try:
            return post()
        except RuntimeError as error:
            raise PipelineError(f"rank {self.rank}, step {self.step}: {message} failed: {cause_of(error)}") from None

    def _tag(self, message: Message, index: int, shape: Shape | str) -> int:
        """Return a tag from the step, the message number, and a checksum of name, dtype and shape."""
        number = self._numbers[message.peer, message.produced_by] * MAX_TENSORS + index
        checksum = zlib.crc32(repr((str(message.produced_by), self.config.compute_dtype, shape)).encode())
        return ((self.step % STEPS) * MESSAGES + number % MESSAGES) * SHAPES + checksum % SHAPES

    def _header(self, message: Message, content: Tensor) -> Tensor:
        """Return the header of a tensor: the numbers of its name, its number of dimensions, and its shape."""
        if content.dim() > MAX_DIMENSIONS:
            raise ValueError(f"tensors: expected at most {MAX_DIMENSIONS} dimensions, got shape {tuple(content.shape)}")
        shape = [*content.shape] + [-1] * (MAX_DIMENSIONS - content.dim())
        return torch.tensor([*self._name(message), content.dim(), *shape], dtype=torch.int64, device=self.device)

    def _name(self, message: Message) -> list[int]:
        """Return the seven numbers of a header that identify the message."""
        kind, stage, microbatch = message.produced_by
        dtype = zlib.crc32(self.config.compute_dtype.encode())
        return [zlib.crc32(b"diptych"), self.step, ord(kind), stage, microbatch, dtype, 0]

    def _check_header(self, message: Message, header: Tensor) -> Shape:
        """Return the shape that a header contains, or raise a PipelineError if it names another message."""
        *name, dimensions = header[:8].tolist()
        if name != self._name(message):
            step, kind, stage, microbatch = name[1:5]
            received = f"{Action(chr(kind), stage, microbatch)} of step {step}" if 0 < kind < 128 else "something else"  # pyright: ignore[reportArgumentType]
            raise PipelineError(
                f"rank {self.rank}, step {self.step}: expected {message}, got {received}; a message before it was "
                "dropped, duplicated, or made with other settings"
            )
        return tuple(header[8 : 8 + dimensions].tolist())

    def _route(self, message: Message) -> tuple[ProcessGroup, int]:
        """Return the group of a message and the rank of its peer in that group."""
        if not self._ordered:
            return self._group, message.peer
        pair = (self.rank, message.peer) if message.direction == "SEND" else (message.peer, self.rank)
        channel = self._channels[pair]
        return channel, dist.get_group_rank(channel, dist.get_global_rank(self._group, message.peer))

    def _make_channels(self) -> dict[tuple[int, int], ProcessGroup]:
        """Create a group for each direction between two ranks, because NCCL serializes the messages of a group.

        Every process of the job creates the groups of every pipeline in the same order, as new_group requires.
        """
        own_ranks = dist.get_process_group_ranks(self._group)
        channels = {}
        pipelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pipelines, own_ranks)
        pairs = [(a, (a + step) % self.size) for step in (1, -1) for a in range(self.size)]
        for ranks in sorted({tuple(ranks) for ranks in pipelines}):
            for pair in dict.fromkeys(pairs):
                group = dist.new_group([ranks[index] for index in pair], group_desc=str(pair))
                if list(ranks) == own_ranks and self.rank in pair:
                    channels[pair] = group
        return channels


@dataclass(eq=False)
class _Receive:
    """A pending receive of one tensor: its buffers and works."""

    header: tuple[dist.Work, Tensor] | None
    content: tuple[dist.Work | None, Tensor] | None
    shape: Shape
