"""Operations of which a model's graph consists: linear layers, norms, casts and dropout."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from diptych.planner.memory.fp8 import (
    DELAYED_BYTES,
    grouped_scratch,
    has_rounded_weight,
    linear_scratch,
    pack_scratch,
)
from diptych.planner.memory.kernel_work import KernelWork, activation
from diptych.planner.memory.nodes import Node, Value
from diptych.planner.memory.regions import OUTPUT_MAPS, TensorParallelRegions
from diptych.plans.activation_storage import ACTIVATION_INPUT, packed_width, saved_input
from diptych.plans.amax_history import NAME
from diptych.plans.config import ITEM_SIZES, TransformerConfig
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.model.philox import TILE_ROWS
from diptych.plans.tensor_parallel import rank_config

PACKED_IN = {
    "mlp_input_fp8": ("mlp_output",),
    "activation_fp8": ("mlp_output", "activation"),
    ACTIVATION_INPUT: ("mlp_output", "activation"),
}
"""Recomputed values whose replay packs an input again, besides the value that is packed."""


@lru_cache(maxsize=64)
def _weights(config: TransformerConfig) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the bytes and the last dimension of every parameter by name."""
    specs = parameter_specs(config)
    item = ITEM_SIZES[config.params_dtype]
    sizes = {name: math.prod(spec.shape) * item for name, spec in specs.items()}
    return MappingProxyType(sizes), MappingProxyType({name: spec.shape[-1] for name, spec in specs.items()})


class OperationBuilder:
    """A builder of operations of a model for one batch.

    Args:
        config: the model, with its tensor-parallel ranks; the operations are those of one of them.
        batch: number of sequences.
        length: tokens of each sequence.
    """

    def __init__(self, config: TransformerConfig, batch: int, length: int) -> None:
        self.regions = TensorParallelRegions(
            config.tensor_model_parallel_size, config.sequence_parallel, batch * length
        )
        config = rank_config(config)
        self.config = config
        self.batch = batch
        self.length = length
        self.tokens = self.regions.tokens_between  # inside of a region, see in_region, its tokens
        self.item = ITEM_SIZES[config.compute_dtype]
        self.wide = max(self.item, 4)
        self.weights, self.widths = _weights(config)
        self.streams = config.residual_streams
        self.first_input: list[Value] = []
        """The embedded tokens, which a variable of the model's forward keeps alive while its layers run."""
        self._packed: dict[tuple[int, str], tuple[Value, Value]] = {}
        """Inputs of linear layers and what they are saved as, by identity and name."""

    def activation(self, name: str, width: int) -> Value:
        """Return a value of ``width`` elements per token in the dtype of activations."""
        return Value(name, self.tokens * width * self.item)

    def coefficient(self, name: str, width: int) -> Value:
        """Return a value of ``width`` elements per token in the dtype of coefficients and statistics."""
        return Value(name, self.tokens * width * self.wide)

    @contextmanager
    def in_region(self) -> Iterator[None]:
        """Count the tokens of a region."""
        self.tokens = self.regions.tokens
        try:
            yield
        finally:
            self.tokens = self.regions.tokens_between

    def dropout_rows(self) -> list[Node]:
        """Return the operation that numbers the rows of dropout by two 64-bit words per token; none without dropout."""
        rows = Value("dropout rows", 16 * self.tokens)
        return [Node([], [rows], [rows])] if self.config.hidden_dropout > 0 else []

    def _dropout_scratch(self, x: Value) -> int:
        """Return the bytes that dropout allocates besides its output.

        They are the mask and a scaled copy of x. Before the output exists, a tile of 64-bit random words with their
        input is more for few tokens.
        """
        width = x.size // self.item // self.tokens
        first = min(TILE_ROWS, self.tokens)
        second = min(TILE_ROWS, self.tokens - first)
        words = max(8 * first, 4 * first + 8 * second) * (width // 4)  # with the four of the tile before
        random = 8 * (words + 2 * self.tokens + width // 4)  # and the numbers of rows and columns
        return self.tokens * width + max(x.size, random - x.size)

    def _layer_norm(self, nodes: list[Node], x: Value, layer: str, name: str) -> Value:
        """Append a norm of a layer, and return its output."""
        normed = self.activation(name, self.config.hidden_size)
        nodes += self._norm(x, normed, f"{layer}.{name}", (name,))
        return normed

    def _norm(self, x: Value, normed: Value, name: str, region: tuple[str, ...]) -> list[Node]:
        """Return the operations of x * rsqrt(mean(x**2)) * weight, as PyTorch's composite norm runs them."""
        nodes: list[Node] = []
        width = self.widths[f"{name}.weight"]
        product = normed
        if self.item < self.wide:
            source = x
            x = Value(f"{x.name} in float32", normed.size // self.item * self.wide)
            nodes.append(Node([source], [x], [], region))  # of a joint projection, only the normed part
            product = Value("product", x.size)
        scaled = Value("normalised", normed.size // self.item * self.wide)
        inverse = Value("norm statistics", scaled.size // width)
        squared = Value("squares", scaled.size)
        weight = self.weights[f"{name}.weight"]
        nodes += [
            Node([x], [squared], [x], region),
            Node([squared], [inverse], [inverse], region),
            Node([x, inverse], [scaled], [x, inverse], region, backward_scratch=scaled.size),
            Node([scaled], [product], [scaled], region, weight, backward_scratch=scaled.size),
        ]
        if product is not normed:
            nodes.append(Node([product], [normed], [], region))
        return nodes

    def _cast(self, nodes: list[Node], x: Value, item: int, region: tuple[str, ...]) -> Value:
        """Return x cast to elements of another size; x itself without mixed precision."""
        if self.item == self.wide:
            return x
        name = f"{x.name} in {'float32' if item == self.wide else 'bfloat16'}"
        copy = Value(name, x.size * item // (self.item + self.wide - item))
        nodes.append(Node([x], [copy], [], region))
        return copy

    def _linear(self, x: Value, y: Value, name: str, region: tuple[str, ...]) -> list[Node]:
        weight = self.weights[f"{name}.weight"]
        parameters = sum(self.weights.get(f"{name}.{own}", 0) for own in ("weight", "bias", NAME))
        in_fp8 = linear_scratch(self.config, name, self.tokens, x.size, y.size)
        rounded = self._saved_beside_input(name, bool(in_fp8))
        narrow = self._narrow_gradient(name, bool(in_fp8))
        forward, backward = in_fp8 or (0, narrow)
        nodes: list[Node] = []
        more: dict[str, Any] = {"flops": self._product(weight), "is_linear": True, "narrow_gradient": narrow}
        saved, unpack, again = self._saved_input(nodes, x, name)
        if saved is not x:
            allocated = 0 if narrow else weight
            more |= {"unpacked": x.size, "exact": x, "packing_scratch": max(backward + x.size, again - allocated)}
            backward = max(backward + x.size, unpack - allocated)
        saves = [saved, *rounded]
        return [*nodes, Node([x], [y, *rounded], saves, region, parameters, forward, backward, **more)]

    def _saved_input(self, nodes: list[Node], x: Value, name: str) -> tuple[Value, int, int]:
        """Append the packing of a layer's input, if it is packed and no layer of the same input has done so.

        Returns:
            What the layer saves in place of its input, and the bytes that backward allocates while it reads this, and
            while it packs and reads the input itself.
        """
        stored = saved_input(self.config, name)
        if stored is None:
            return x, 0, 0
        width = self.widths[f"{name}.weight"]
        rows = x.size // (self.item * width)
        pack, unpack = pack_scratch(rows, width, self.item)
        if (id(x), stored) not in self._packed:
            packed = Value(stored, rows * packed_width(width))
            region = (*PACKED_IN.get(stored, ()), x.name)
            nodes.append(Node([x], [packed], [], region, forward_scratch=pack - packed.size, is_packing=True))
            self._packed[id(x), stored] = x, packed
        packed = self._packed[id(x), stored][1]
        return packed, unpack, max(pack, packed.size + unpack)

    def _packed_activation(self, fc1: Value, activated: Value, width: int, region: tuple[str, ...]) -> list[Node]:
        """Return an activation function that saves its input [rows, width] in 8 bits; backward repeats forward."""
        rows = fc1.size // (self.item * width)
        pack, unpack = pack_scratch(rows, width, self.item)
        packed = Value(ACTIVATION_INPUT, rows * packed_width(width))
        silu = activated.size if activated.size < fc1.size else 0  # of the gate, and its gradient
        again = fc1.size + activated.size + 2 * silu
        kernels = activation(activated.size // self.item, silu > 0, self.item)
        return [
            Node([fc1], [packed], [], region, forward_scratch=pack - packed.size, is_packing=True),
            Node(
                *([fc1], [activated], [packed], region),
                forward_scratch=silu,
                backward_scratch=max(unpack, again),
                unpacked=fc1.size,
                kernels=KernelWork(kernels.forward, (*kernels.forward, *kernels.backward)),
            ),
        ]

    def _saved_beside_input(self, name: str, in_fp8: bool) -> list[Value]:
        """Return what a linear layer saves for backward beside its input."""
        if f"{name}.{NAME}" in self.weights:
            return [Value("scales and exponents", DELAYED_BYTES)]
        return [] if in_fp8 else self.rounded_weights(name)

    def rounded_weights(self, name: str) -> list[Value]:
        """Return the copy of a weight in the type of activations, if it is not stored in this type."""
        weight = f"{name}.weight"
        is_stored = has_rounded_weight(self.config, name)
        return [] if is_stored else [Value("weights in bfloat16", self.weights[weight] // 2)]

    def _narrow_gradient(self, name: str, in_fp8: bool) -> int:
        """Return the bytes of a weight's gradient before it is widened to float32; 0 if its product is float32."""
        is_widened = has_rounded_weight(self.config, name) if in_fp8 else True
        return self.weights[f"{name}.weight"] // 2 if self.item != self.wide and is_widened else 0

    def _product(self, weight_bytes: int) -> int:
        """Return the floating-point operations of a product of all tokens with a matrix."""
        return 2 * self.tokens * weight_bytes // ITEM_SIZES[self.config.params_dtype]

    def _mapped(self, nodes: list[Node], x: Value, called: str, width: int, name: str) -> Value:
        """Append a linear layer of x with its bias, and return its output."""
        y = self.activation(called, width)
        nodes += self._linear(x, y, name, ())
        return self._biased(nodes, y, name, ())

    def _grouped_linear(self, nodes: list[Node], x: Value, y: Value, name: str) -> None:
        """Append the linear layers of all experts, each on its rows."""
        weight = self.weights[f"{name}.weight"]
        experts = self.config.num_moe_experts or 1
        flops = self._product(weight // experts) * self.config.moe_router_topk
        in_fp8 = grouped_scratch(self.config, name, self.tokens * self.config.moe_router_topk, x.size, y.size)
        rounded = self._saved_beside_input(name, bool(in_fp8))
        saved, unpack, again = self._saved_input(nodes, x, name)
        saves = [saved, *rounded]
        more: dict[str, Any] = {"flops": flops}
        narrow = self._narrow_gradient(name, bool(in_fp8)) if in_fp8 or saved is not x else 0
        # All experts' weight gradients exist twice while they are joined; the operands are freed by then.
        scratch = in_fp8 or (y.size, max(0, weight - y.size - sum(value.size for value in saves)))
        if saved is not x:  # each expert's products are copied into place
            product = max(x.size, narrow or weight) // experts
            forward, backward = in_fp8 or (y.size // experts, narrow + product)
            allocated = x.size + (0 if narrow else weight)
            more |= {"unpacked": x.size, "exact": x, "packing_scratch": max(backward + x.size, again - allocated)}
            scratch = (forward, max(backward + x.size, unpack - allocated))
        parameters = weight + self.weights.get(f"{name}.{NAME}", 0)
        more["narrow_gradient"] = narrow
        nodes.append(Node([x], [y, *rounded], saves, ("mlp_output",), parameters, *scratch, **more))

    def _biased(
        self, nodes: list[Node], output: Value, name: str, region: tuple[str, ...], is_summed: bool = False
    ) -> Value:
        """Append the addition of a bias, if there is one; that of a sum over ranks waits for the sum."""
        waits = self.regions.size > 1 and name.endswith(OUTPUT_MAPS) and not is_summed
        if waits or f"{name}.bias" not in self.weights:
            return output
        biased = Value(output.name, output.size)
        output.name = "before the bias"
        nodes.append(Node([output], [biased], [], region))
        return biased
