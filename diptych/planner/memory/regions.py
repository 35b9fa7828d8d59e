"""The operations around the regions that tensor-parallel ranks share: exchanges, embedding and loss of parts.

See reference_torch/tensor_parallel.py, whose allocations these are.
"""

from diptych.planner.memory.nodes import Node, Value

OUTPUT_MAPS = ("self_attention.linear_proj", "mlp.linear_fc2")
"""Linear layers whose outputs are summed over ranks, before their bias is added."""


class TensorParallelRegions:
    """Sizes of one rank's tokens, and the exchanges between them.

    Args:
        size: tensor-parallel ranks.
        sequence_parallel: the ranks have different tokens between regions.
        tokens: tokens of a region.
    """

    def __init__(self, size: int, sequence_parallel: bool, tokens: int) -> None:
        self.size = size
        self.tokens = tokens
        self.parts = size if sequence_parallel else 1

    @property
    def tokens_between(self) -> int:
        """Tokens of a rank between regions."""
        return self.tokens // self.parts

    def enter(self, nodes: list[Node], x: Value) -> Value:
        """Append the exchange before a region, and return the region's input."""
        if self.parts == 1:
            return x
        entered = Value("region_input", x.size * self.parts)
        # A part from every rank, side by side afterwards; in backward a part for every rank.
        nodes.append(Node([x], [entered], [], forward_scratch=entered.size, backward_scratch=entered.size))
        return entered

    def leave(self, nodes: list[Node], x: Value) -> Value:
        """Append the exchange after a region, and return the sum of the ranks' outputs, or this rank's tokens of it."""
        if self.size == 1:
            return x
        left = Value("region_output", x.size // self.parts)
        scratch = x.size if self.parts > 1 else 0
        nodes.append(Node([x], [left], [], forward_scratch=scratch, backward_scratch=scratch))
        return left

    def embed(self, nodes: list[Node], embedded: Value, table: int, shared: int, item: int) -> Value:
        """Append the embedding, and return its output; with several ranks, the sum of the ranks' embeddings.

        Args:
            nodes: operations so far.
            embedded: vectors of all tokens of the region; with several ranks, before their sum.
            table: bytes of the rank's vectors.
            shared: bytes that backward needs for the sum with a tied head's gradient.
            item: bytes of an element of the table.
        """
        if self.size == 1:
            nodes.append(Node([], [embedded], parameters=table, backward_scratch=shared))
            return embedded
        ids = Value("token ids", 8 * self.tokens)
        is_own = Value("token ids", item * self.tokens)
        own = Value("embedded", embedded.size)
        nodes.append(Node([], [own, ids], [ids], parameters=table, backward_scratch=shared))
        nodes.append(Node([own], [embedded, is_own], [is_own]))
        return self.leave(nodes, embedded)

    def loss(self, nodes: list[Node], logits: Value, probabilities: Value, loss: Value) -> None:
        """Append the cross entropy of the logits, or of the rank's part, which saves probabilities and targets."""
        if self.size == 1:
            nodes += [Node([logits], [probabilities], [probabilities]), Node([probabilities], [loss])]
            return
        ids = Value("token ids", 9 * self.tokens)  # and which of them are the rank's own
        scratch = probabilities.size  # a copy with the targets subtracted
        nodes.append(Node([logits], [loss, probabilities, ids], [probabilities, ids], backward_scratch=scratch))
