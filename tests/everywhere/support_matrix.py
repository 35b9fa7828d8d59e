"""Every technique in everything that surrounds a model, on one small model that knows of neither.

A cell trains the model on two microbatches with a technique, and again without it, in the same surroundings. It fails
if the technique did nothing: a copy that has lost it has the right gradients too. This writes the table of
docs/everywhere.md:

    python -m tests.everywhere.support_matrix
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from reference_torch import add_hyper_connections
from reference_torch.context_parallel import build_cp_context, cp_attention, cp_short_convolution
from reference_torch.delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from reference_torch.offload import offload_modules
from reference_torch.ops import short_convolution
from reference_torch.pipeline import PipelineExecutor, split_model
from reference_torch.recompute import recompute_modules, region
from tests.everywhere.support_table import PAGE, limit_in_words, update, write_table

COMMAND = "python -m tests.everywhere.support_matrix"
WIDTH = 16
LENGTH = 32
MICROBATCHES = 2
TECHNIQUES = ("recompute_modules", "PipelineExecutor", "offload_modules", "cp_context", "add_hyper_connections")
SURROUNDINGS = (
    "eager",
    "torch.compile",
    "torch.autocast",
    "DDP",
    "FSDP2",
    "torch checkpoint outside",
    "torch checkpoint inside",
    "DTensor",
    "inference mode",
    "deepcopy",
    "pickle",
    "torch.func",
)
EQUAL = {"recompute_modules": 0.0, "offload_modules": 0.0}
"""Largest difference of a cell, in float64, relative to the largest gradient; 1e-14 if not given."""
IN_BFLOAT16 = {"cp_context": 1e-2}
"""The same under torch.autocast."""
REFUSED = {
    ("recompute_modules", "torch.func"): "NotImplementedError: .* use torch.autograd.grad instead",
    ("offload_modules", "torch.func"): "OffloadError: .* use torch.autograd.grad",
    ("PipelineExecutor", "torch.func"): "NotImplementedError: PipelineExecutor: .* use the gradients of step",
    ("PipelineExecutor", "pickle"): "TypeError: split_model: .* save stage.state_dict",
    ("cp_context", "torch.func"): "NotImplementedError: cp_short_convolution: .* use torch.autograd",
}
"""Errors of the cells that are refused, as a regular expression."""
INACTIVE = {("offload_modules", name): "plain copy" for name in ("deepcopy", "pickle")}
"""Cells in which the technique does nothing, as docs/everywhere.md says, and their text in the table."""
DROPPED = {"torch checkpoint inside": 3 * MICROBATCHES}
"""Outputs that recompute drops at least: the activation of each block, and where it is not inside of another
checkpoint, also the norm."""
REPLACING = ("FSDP2", "DTensor")
"""Surroundings that replace the parameters of a model, so that offload moves only activations."""
RANKS = {"DDP": 2, "FSDP2": 2, "DTensor": 2}
"""Number of ranks of a replicated, sharded or tensor-parallel model; 1 if not given. Context parallelism doubles it."""


class Current:
    """What the functions of the model read: the context of the sequences, and whether torch.func transforms them."""

    context: Any = None
    is_transformed = False


current = Current()


class Mixer(nn.Module):
    """Attention plus a delta rule, both on this rank's part of the tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, 8)) for x in (q, k, v))
        gates = decay.unflatten(-1, (-1, 8))[..., 0]
        if current.context is None:
            by_head = [x.transpose(1, 2) for x in (q, k, v)]
            attended = F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], is_causal=True).transpose(
                1, 2
            )
        else:
            attended = cp_attention(q, k, v, current.context)
        arguments = q, k, v, F.logsigmoid(gates), gates.sigmoid()
        if current.context is None and current.is_transformed:  # the chunked form is refused under torch.func
            o, _ = recurrent_gated_delta_rule(*arguments, use_qk_l2norm_in_kernel=True)
        else:
            o, _ = chunk_gated_delta_rule(*arguments, use_qk_l2norm_in_kernel=True, cp_context=current.context)
        return (attended + o).flatten(-2)


class Block(nn.Module):
    """A pre-norm block: a convolution, a mixer of tokens and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(WIDTH, 3))
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.decay = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mixer = Mixer()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up, self.activation, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if current.context is None:
            y = short_convolution(y, self.taps, torch.arange(y.shape[1]))
        else:
            y = cp_short_convolution(y, self.taps, current.context)
        return self.proj(self.mixer(self.q(y), self.k(y), self.v(y), self.decay(y)))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x)
        return x + mixed + self.down(self.activation(self.up(mixed)))


class CheckpointedBlock(Block):
    """The block with torch.utils.checkpoint inside."""

    def mix(self, x: Tensor) -> Tensor:
        return checkpoint(super().mix, x, use_reentrant=False)


class Model(nn.Module):
    """Three blocks and a head."""

    def __init__(self, block: type[Block] = Block, outside: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.outside else block(x)
        return self.head(x)


def make(surroundings: str) -> Model:
    """Return the model; each call returns equal weights."""
    torch.manual_seed(0)
    inside = surroundings == "torch checkpoint inside"
    model = Model(CheckpointedBlock if inside else Block, surroundings == "torch checkpoint outside")
    return model.to(torch.float32 if surroundings == "torch.autocast" else torch.float64)


def wrap(surroundings: str, part: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    """Apply surroundings that wrap a model, or a stage of it."""
    blocks = [module for module in part.modules() if isinstance(module, Block)]
    match surroundings:
        case "torch.compile":
            for block in blocks:
                block.compile(backend="aot_eager")
        case "DDP":
            assert mesh is not None
            return DistributedDataParallel(part, process_group=mesh.get_group())
        case "FSDP2":
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(part, mesh=mesh)
        case "DTensor":
            assert mesh is not None
            split: dict[str, ParallelStyle] = dict.fromkeys(("q", "k", "v", "decay", "up"), ColwiseParallel())
            for block in blocks:
                parallelize_module(block, mesh, {**split, **dict.fromkeys(("proj", "down"), RowwiseParallel())})
        case "deepcopy":
            return deepcopy(part)
        case "pickle":
            file = io.BytesIO()
            torch.save(part, file)
            file.seek(0)
            return torch.load(file, weights_only=False)
    return part


class Cell:
    """One technique in one kind of surroundings, on this rank.

    Args:
        technique: its name, or the empty string for the model alone.
        surroundings: their name.
        mesh: ranks of the surroundings; None: one.
        group: ranks of the context; None: this rank has all tokens.
        alone: a group of this rank alone, for a pipeline; None: there are no ranks.
    """

    def __init__(
        self, technique: str, surroundings: str, mesh: DeviceMesh | None, group: Any = None, alone: Any = None
    ) -> None:
        self.technique = technique
        self.surroundings = surroundings
        self.mesh = mesh
        self.alone = alone
        offsets = torch.tensor([0, LENGTH], dtype=torch.int32)
        self.context = None if group is None else build_cp_context(offsets, group, 3)
        self.model = make(surroundings)
        self.close = lambda: None
        self.moves: list[str] = []
        if technique == "recompute_modules":
            recompute_modules(self.model, {"blocks.*": ["norm", "activation"]})
        elif technique == "add_hyper_connections":
            add_hyper_connections(self.model, ["blocks.*"], num_residual_streams=2)
        elif technique == "offload_modules":
            self.manager = offload_modules(self.model, ["blocks.*"], activations=True, activation_min_bytes=1)
            self.close = self.manager.close
        parts = split_model(self.model, ["blocks.1", "head"]) if technique == "PipelineExecutor" else [self.model]
        self.parts = [wrap(surroundings, part, mesh) for part in parts]
        if technique == "offload_modules":
            self.manager.trace = self.moves  # from now on: wrapping fetches what it reads

    def is_active(self, dropped: int, additional: list[Tensor]) -> bool:
        """Return whether the technique has done what it should in all blocks.

        Args:
            dropped: number of outputs that recompute has dropped.
            additional: gradients of parameters that the plain model does not have.
        """
        match self.technique:
            case "recompute_modules":
                return dropped >= DROPPED.get(self.surroundings, 2 * 3 * MICROBATCHES)
            case "offload_modules":
                fetched = [move[1:] for move in self.moves if move[0] == "+"]
                layers = {name for name in fetched if name.isdigit()}
                activations = {name for name in fetched if name[0] == "a"}
                return bool(activations) and (len(layers) == 3 or self.surroundings in REPLACING)
            case "add_hyper_connections":
                return any(gradient.abs().max() > 0 for gradient in additional)
        return True

    def microbatches(self) -> list[Tensor]:
        """Return this rank's tokens of every microbatch."""
        generator = torch.Generator().manual_seed(1 + (0 if self.mesh is None else self._replica()))
        whole = torch.randn(MICROBATCHES, 1, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
        whole = whole.to(self.model.head.weight.dtype)
        return [*whole] if self.context is None else [*whole.chunk(self.context.size, dim=2)[self.context.rank]]

    def _replica(self) -> int:
        return self.mesh.get_local_rank() if self.surroundings in ("DDP", "FSDP2") and self.mesh is not None else 0

    @contextmanager
    def around(self) -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16) if self.surroundings == "torch.autocast" else nullcontext():
            yield

    def outputs(self) -> list[Tensor]:
        """Return the outputs of all microbatches."""
        xs = self.microbatches()
        if self.technique == "PipelineExecutor":
            return self._pipeline().forward(xs)
        with self.around():
            return [self.parts[0](x) for x in xs]

    def _pipeline(self) -> PipelineExecutor:
        shared: Any = [] if self.surroundings in ("FSDP2", "DTensor") else None
        return PipelineExecutor(self.parts, "1f1b", MICROBATCHES, loss_of, group=self.alone, shared_parameters=shared)

    def train(self) -> dict[str, Tensor]:
        """Return the sums of all microbatches' gradients, by name."""
        xs = self.microbatches()
        if self.technique == "PipelineExecutor":
            with self.around():
                self._pipeline().step(xs, xs)
        for x in xs if self.technique != "PipelineExecutor" else ():
            with self.around():
                loss = loss_of(self.parts[0](x), x)
            (loss / MICROBATCHES).backward()
        return {
            name.replace("module.", ""): whole(parameter.grad)
            for part in self.parts
            for name, parameter in part.named_parameters()
            if parameter.grad is not None
        }

    def differentiate(self) -> dict[str, Tensor]:
        """Return the gradients of one microbatch that torch.func computes."""
        x = self.microbatches()[0]

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return loss_of(torch.func.functional_call(self.parts[0], parameters, (x,)), x)

        if self.technique == "PipelineExecutor":
            return torch.func.grad(lambda x: self._pipeline().step([x] * 2, [x] * 2)[0])(x)
        return torch.func.grad(loss)({name: p.detach() for name, p in self.parts[0].named_parameters()})


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A loss with a different gradient at every element."""
    return (output.sin() * target).sum()


def whole(gradient: Any) -> Tensor:
    """Return a gradient with all its shards."""
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).detach().clone()


def results(cell: Cell) -> dict[str, Tensor]:
    """Return what is compared: gradients, and outputs if the surroundings give none."""
    current.context = cell.context
    current.is_transformed = cell.surroundings == "torch.func"
    if cell.surroundings == "torch.func":
        return cell.differentiate()
    if cell.surroundings == "inference mode":
        with torch.inference_mode():
            outputs = cell.outputs()
        outputs = {f"output {number}": output.clone() for number, output in enumerate(outputs)}
        return outputs | cell.train()  # training goes on after it
    return cell.train()


def run(technique: str, surroundings: str) -> str:
    """Run a cell on this rank.

    Returns:
        the largest difference of a result to that without the technique, relative to the largest result, the type and
        text of the error that refuses the cell, or "inactive" if the technique did nothing.
    """
    ranks = RANKS.get(surroundings, 1)
    context_ranks = 2 if technique == "cp_context" else 1
    mesh, group, alone = None, None, None
    if ranks * context_ranks > 1:
        all_ranks = init_device_mesh("cpu", (context_ranks, ranks, 1), mesh_dim_names=("cp", "inner", "pp"))
        mesh = all_ranks["inner"] if ranks > 1 else None
        group = all_ranks.get_group("cp") if context_ranks > 1 else None
        alone = all_ranks.get_group("pp")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dynamo, about graph breaks
        expected = results(Cell("", surroundings, mesh))
        cell = None
        is_active = True
        try:
            with patch.object(region, "empty_storage", wraps=region.empty_storage) as emptied:
                cell = Cell(technique, surroundings, mesh, group, alone)
                found = results(cell)
            additional = [tensor for name, tensor in found.items() if name not in expected]
            is_active = cell.is_active(emptied.call_count, additional)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if cell is not None:
                cell.close()
    if group is not None:
        found = {name: joined(name, tensor, group) for name, tensor in found.items()}
    return f"{difference(found, expected):.0e}" if is_active else "inactive"


def joined(name: str, tensor: Tensor, group: Any) -> Tensor:
    """Return the sum of a gradient over the ranks of a context, or the output of all their parts."""
    if not name.startswith("output"):
        dist.all_reduce(tensor, group=group)
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest expected element; found may have more parameters."""
    missing = expected.keys() - found.keys()
    assert not missing, f"no result for {missing}"
    largest = max(tensor.abs().max().item() for tensor in expected.values())
    return max((found[name] - tensor).abs().max().item() for name, tensor in expected.items()) / largest


def limit(technique: str, surroundings: str) -> float:
    """Return the largest difference of a cell."""
    if surroundings == "torch.autocast" and technique in IN_BFLOAT16:
        return IN_BFLOAT16[technique]
    return EQUAL.get(technique, 1e-14)


def cell_in_words(technique: str, surroundings: str) -> str:
    """Return the text of a cell of the table."""
    if (technique, surroundings) in INACTIVE:
        return INACTIVE[technique, surroundings]
    return "refused" if (technique, surroundings) in REFUSED else limit_in_words(limit(technique, surroundings))


def updated(page: str) -> str:
    """Return the page with the table."""
    return update(page, COMMAND, write_table(TECHNIQUES, SURROUNDINGS, cell_in_words))


def main() -> None:
    """Write the table to the page."""
    PAGE.write_text(updated(PAGE.read_text()))


if __name__ == "__main__":
    main()
