"""recompute_modules in models that this project did not write, and in what surrounds a model."""

import copy
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from reference_torch.rank_pool import RankPool
from reference_torch.recompute import RecomputeMismatchError, RecomputeUsageError, measure_memory, recompute_modules
from tests.everywhere.torch_models import MODELS, NAMES, assert_same, build, step

CHOSEN = {"blocks.*": ["norm", "activation", "dropout", "batch_norm"]}


class Block(nn.Module):
    """A block with a norm, an activation, dropout and a batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.activation = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
        self.dropout, self.down, self.batch_norm = nn.Dropout(0.1), nn.Linear(4 * width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        x = x + self.down(self.dropout(self.activation(self.up(self.norm(x)))))
        return self.batch_norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Model(nn.Module):
    """A few blocks and a head."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(recompute: bool, width: int = 8) -> Model:
    """The model; each call returns equal weights."""
    torch.manual_seed(0)
    found = Model(width)
    if recompute:
        recompute_modules(found, CHOSEN)
    return found


def inputs(width: int = 8, length: int = 6) -> dict[str, torch.Tensor]:
    """A batch, which needs a gradient."""
    return {"x": torch.randn(2, length, width, generator=torch.Generator().manual_seed(1), requires_grad=True)}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_others_has_the_same_gradients_and_saves_less(name):
    example = MODELS[name]
    batch = example.inputs()
    plain, other = build(name), build(name)
    names, state = [*dict(other.named_parameters())], [*other.state_dict()]
    handle = recompute_modules(other, example.recomputed)
    for _ in range(2):
        assert_same(step(other, batch), step(plain, batch))
    report = handle.report(**batch)
    assert report.keys() == {"", *handle.blocks, *(each for names in handle.blocks.values() for each in names)}
    assert sum(each.after for each in report.values()) < sum(each.before for each in report.values())
    assert names == [*dict(other.named_parameters())]
    assert state == [*other.state_dict()]
    handle.remove()
    assert all("forward" not in vars(module) for module in other.modules())
    assert_same(step(other, batch), step(plain, batch))


def test_the_report_is_what_the_allocator_measures():
    batch = inputs(64, 128)["x"].detach()
    other = model(True, 64)
    handle = recompute_modules(built := model(False, 64), CHOSEN)
    report = handle.report(batch)
    buffers = {name: buffer.clone() for name, buffer in built.named_buffers()}
    handle.report(batch)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in built.named_buffers())

    def measured(each: nn.Module) -> int:
        measure_memory(lambda: each(batch), lambda y: y.sum().backward())
        return measure_memory(lambda: each(batch), lambda y: y.sum().backward()).saved - batch.nbytes  # the result

    before, after = (sum(each[i] for each in report.values()) for i in (0, 1))
    assert measured(model(False, 64)) == pytest.approx(before, rel=0.02)
    assert measured(other) == pytest.approx(after, rel=0.06)
    assert after < 0.5 * before


def no_change(each):
    """The model as it is."""
    return each


def compiled(each):
    """The model under torch.compile, whose graph breaks at every block."""
    return torch.compile(each, backend="aot_eager")


def with_compiled_submodules(each):
    """Some submodules compiled by themselves."""
    for block in each.blocks:
        block.activation.compile(backend="aot_eager")
        block.up.compile(backend="aot_eager")
    return each


class Checkpointed(nn.Module):
    """Every block in torch.utils.checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = inner.blocks, inner.head

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def with_inner_checkpoints(each):
    """torch.utils.checkpoint inside the recomputed submodules."""
    for block in each.blocks:
        plain = block.activation
        block.activation = nn.Sequential(plain)
        plain.forward = lambda x: checkpoint(torch.nn.functional.gelu, x, use_reentrant=False)
    return each


SURROUNDINGS = {
    "eager": no_change,
    "deepcopy": copy.deepcopy,
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "compile": compiled,
    "compiled submodules": with_compiled_submodules,
    "torch checkpoint outside": Checkpointed,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings(name):
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dynamo, about graph breaks
        found = step(SURROUNDINGS[name](model(True)), inputs())
    expected = step(model(False), inputs())
    if name == "torch checkpoint outside":  # which updates buffers twice, with or without recompute
        found, expected = ({n: t for n, t in each.items() if "batch_norm.r" not in n} for each in (found, expected))
        found, expected = ({n: t for n, t in each.items() if "tracked" not in n} for each in (found, expected))
    assert_same({n.removeprefix("_orig_mod."): t for n, t in found.items()}, expected)


def test_torch_checkpoint_inside():
    found, plain = with_inner_checkpoints(model(False)), with_inner_checkpoints(model(False))
    recompute_modules(found, CHOSEN)
    assert_same(step(found, inputs()), step(plain, inputs()))


def test_autocast_and_hooks_outside():
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(step(model(True), inputs()), step(model(False), inputs()))
    with save_on_cpu():
        assert_same(step(model(True), inputs()), step(model(False), inputs()))


def test_nothing_is_dropped_without_gradients_or_in_eval_mode():
    plain, other = model(False), model(True)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.manual_seed(0)
            expected = plain(**inputs())
            torch.manual_seed(0)
            assert torch.equal(other(**inputs()), expected)
    assert_same(step(other.eval(), inputs()), step(plain.eval(), inputs()))


def test_func_transforms_are_refused_by_name():
    other = model(True)
    with pytest.raises(NotImplementedError, match=r"expected a place that allows saved-tensor hooks"):
        torch.func.grad(lambda x: other(x).sum())(inputs()["x"].detach())


@pytest.mark.multiprocess
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_data_parallel_models(kind, order):
    with RankPool(2, 120.0) as pool:
        assert pool.run(f"{__name__}:train_in_parallel", kind, order) == [True, True]


def train_in_parallel(kind: str, order: str) -> bool:
    """Train with and without recompute on this rank, and say whether all parameters are equal."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    trained = []
    for recompute in (False, True):
        inner = outer = model(recompute and order == "before")
        if kind == "DDP":
            outer = DistributedDataParallel(inner)
        else:
            for block in inner.blocks:
                fully_shard(block)
            fully_shard(inner)
        if recompute and order == "after":
            recompute_modules(inner, CHOSEN)
        optimizer = torch.optim.AdamW(outer.parameters(), 0.01)
        torch.manual_seed(torch.distributed.get_rank())
        for _ in range(3):
            outer(torch.randn(2, 6, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in outer.parameters()])
    return all(torch.equal(first, second) for first, second in zip(*trained, strict=True))


class Stashing(nn.Module):
    """A block that keeps an output for later, returns another, and changes a third in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.linear = nn.Tanh(), nn.GELU(), nn.Softplus(), nn.Linear(8, 8)
        self.hidden = torch.empty(0)

    def forward(self, x):
        self.hidden = self.first(x)
        changed = self.third(x)
        changed += 1
        return self.second(self.linear(self.hidden)), (changed, self.hidden[:, 1:])


def test_outputs_that_code_still_holds_stay():
    """A stashed output, a returned output and view, and one changed in place are read after the block."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        block = Stashing()
        if recompute:
            recompute_modules(block, {"": ["first", "second", "third"]})
        x = inputs()["x"]
        output, (changed, part) = block(x)
        loss = (output.square().sum() + changed.sum() + part.sum() * 3) * block.hidden.sum()
        loss.backward()
        results.append([output, changed, part, x.grad, block.linear.weight.grad])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


class Counting(nn.Module):
    """A module whose output depends on a buffer that it updates, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        output = (x - self.mean).sin() * (self.calls + 1)
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        self.calls = self.calls + 1
        return output


def test_a_shared_module_and_a_part_of_it_are_refused():
    """Their names do not show that one is in the other."""
    first, second = (nn.ModuleDict({"norm": nn.Sequential(nn.LayerNorm(8), nn.Tanh())}) for _ in range(2))
    second["norm"] = first["norm"]
    model = nn.ModuleList([first, second])
    message = "expected separate submodules, got 0.norm and 1.norm.0, a shared module, which is inside it"
    with pytest.raises(ValueError, match=message):
        recompute_modules(model, {"0": ["norm"], "1": ["norm.0"]})
    assert not any("forward" in vars(module) for module in model.modules())


def test_buffers_are_updated_once_and_read_as_in_forward():
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        found = nn.Sequential(Counting(), nn.Linear(8, 8), Counting(), nn.Linear(8, 8))
        if recompute:
            recompute_modules(found, {"": ["0", "2"]})
        x = inputs()["x"]
        for _ in range(2):
            (found(x) + found(2 * x)).square().sum().backward()
        results.append([x.grad, *(p.grad for p in found.parameters()), *found.buffers()])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


class Drawing(nn.Module):
    """It draws from the generators of Python, NumPy and PyTorch."""

    def forward(self, x):
        return x * random.random() * np.random.rand() * torch.rand(())


def test_a_report_leaves_all_random_generators_as_they_are():
    found = nn.Sequential(Drawing(), nn.ReLU(), nn.Linear(8, 8))
    handle = recompute_modules(found, {"": ["1"]})
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    first = found(torch.ones(2, 8))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    handle.report(torch.ones(2, 8))
    assert torch.equal(found(torch.ones(2, 8)), first)


class OwnBatchNorm(nn.Module):
    """F.batch_norm on large buffers of another module than a batch norm; it changes no version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2**15))
        self.register_buffer("var", torch.ones(2**15))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)


def test_large_statistics_are_updated_once():
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        found = nn.Sequential(OwnBatchNorm(), nn.ReLU())
        if recompute:
            recompute_modules(found, {"": ["0"]})
        x = torch.randn(4, 2**15, requires_grad=True)
        (found(x) + found(2 * x)).square().sum().backward()
        results.append([x.grad, *found.buffers()])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


class Average(nn.Module):
    """A module that replaces its buffer and reads the new one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean((0, 1))
        return torch.sigmoid(x * self.average)


def test_a_buffer_that_inference_has_replaced():
    """It is an inference tensor, which has no version and cannot be written."""
    results = []
    for recompute in (False, True):
        found = model(False)
        found.blocks[1].activation = nn.Sequential(nn.Linear(32, 8), Average(), nn.Linear(8, 32))
        if recompute:
            recompute_modules(found, {"blocks.1": ["activation"]})
        batch = inputs()["x"]
        with torch.inference_mode():
            found(batch)
        for _ in range(2):
            found(batch).square().sum().backward()
        results.append([batch.grad, *(p.grad for p in found.parameters()), *found.buffers()])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


class Attends(nn.Module):
    """Self-attention, which PyTorch computes in another way if its three inputs are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("names", [["attention"], ["first", "second"]])
def test_one_input_given_several_times_and_one_module_under_two_names(names):
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        found = nn.Sequential(Attends())
        found[0].first = found[0].second = nn.Dropout(0.2)
        found[0].forward = lambda x, own=found[0]: own.second(own.first(Attends.forward(own, x)))
        batch = inputs()["x"]
        if recompute:
            handle = recompute_modules(found, {"0": names})
            assert {"0", *(f"0.{name}" for name in names)} < handle.report(batch).keys()
        found(batch * 1.0).square().sum().backward()
        results.append([batch.grad, *(p.grad for p in found.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


MISTAKES = [
    ({}, ValueError, "expected at least one pattern, got none"),
    ({"blocks.*": []}, ValueError, "modules, blocks.0: expected at least one pattern, got none"),
    ({"blocks.*": "norm"}, TypeError, "expected a list of patterns, got 'norm'"),
    (["blocks.*"], TypeError, "expected a mapping from patterns of blocks"),
    ({"block.*": ["norm"]}, ValueError, r"'block\.\*', which matches none of blocks"),
    ({"blocks.*": ["nrm"]}, ValueError, "'nrm', which matches none of norm"),
    ({"blocks.*": ["norm"], "": ["head"]}, ValueError, r"got the whole and blocks\.0 inside it"),
    ({"": ["blocks.0", "blocks.*.norm"]}, ValueError, r"got blocks\.0 and blocks\.0\.norm inside it"),
    ({"blocks.0.norm": ["weight"]}, ValueError, "since there are no submodules"),
    ({"blocks.*": ["norm"], "head": ["weight"]}, ValueError, "modules, head: expected .* got 'weight'"),
    ({"*.*": ["norm"], "blocks.?": ["norm"]}, ValueError, r"'blocks\.\?', which matches none"),
]


@pytest.mark.parametrize(("modules", "kind", "message"), MISTAKES)
def test_mistakes_are_named(modules, kind, message):
    with pytest.raises(kind, match=message):
        recompute_modules(model(False), modules)


def test_a_pattern_may_match_in_some_blocks_only():
    found = model(False)
    del found.blocks[1].dropout
    found.blocks[2].extra = nn.Identity()
    handle = recompute_modules(found, {"blocks.*": ["norm", "dropout", "extra"], "blocks.0": ["activation"]})
    assert handle.blocks == {
        "blocks.0": ("blocks.0.norm", "blocks.0.activation", "blocks.0.dropout"),
        "blocks.1": ("blocks.1.norm",),
        "blocks.2": ("blocks.2.norm", "blocks.2.dropout", "blocks.2.extra"),
    }
    with pytest.raises(ValueError, match=r"modules, blocks\.1: .* got 'dropout', which matches none"):
        recompute_modules(found, {"blocks.*": ["dropout"]})


def test_a_second_recompute_and_a_late_removal_are_refused():
    found = model(False)
    handle = recompute_modules(found, CHOSEN)
    with pytest.raises(ValueError, match=r"got blocks\.0, which has it; remove\(\) it first"):
        recompute_modules(found, CHOSEN)
    found.blocks[1].forward = lambda x: x
    with pytest.raises(RecomputeUsageError, match=r"the forward of recompute_modules in 'blocks\.1', got one that"):
        handle.remove()
    del found.blocks[1].forward
    with pytest.raises(RecomputeUsageError, match=r"'blocks\.1'"):
        handle.remove()
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got function"):
        recompute_modules(lambda x: x, CHOSEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which is deprecated
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got a ScriptModule"):
        recompute_modules(scripted, {"": ["x"]})


def test_a_removed_handle_is_used_up():
    handle = recompute_modules(model(False), CHOSEN)
    handle.remove()
    handle.remove()
    with pytest.raises(RecomputeUsageError, match="got removed recompute; call report before remove"):
        handle.report(**inputs())


def test_forwards_of_others_on_the_instance_stay():
    """Libraries replace the forward of an instance too; ours calls theirs, and puts it back."""
    found, plain = model(False), model(False)
    for each in (found, plain):
        norm = each.blocks[0].norm
        norm.forward = lambda x, norm=norm: 2 * nn.LayerNorm.forward(norm, x)
    theirs = found.blocks[0].norm.forward
    handle = recompute_modules(found, CHOSEN)
    assert_same(step(found, inputs()), step(plain, inputs()))
    handle.remove()
    assert found.blocks[0].norm.forward is theirs


@pytest.mark.parametrize("requires_grad", [False, True])
def test_functional_call_is_named(requires_grad):
    """It takes its parameters back before the replay, which then reads those of the module."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 4)).double()
    recompute_modules(model, {"0": ["0", "1"]})
    others = {name: (p + 1.0).detach().requires_grad_(requires_grad) for name, p in model.named_parameters()}
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    loss = torch.func.functional_call(model, others, (x,)).square().sum()
    with pytest.raises(RecomputeMismatchError, match=r"called by functional_call, which takes its tensors back\?"):
        loss.backward()


def test_an_input_changed_in_place_is_named():
    found = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)))
    recompute_modules(found, {"1": ["0"]})
    with pytest.raises(RecomputeUsageError, match=r"'1\.0': expected a call that leaves its inputs as they are"):
        found(inputs()["x"])


def test_several_forwards_before_their_backwards():
    results = []
    for recompute in (False, True):
        found = model(recompute)
        torch.manual_seed(1)
        x = [inputs()["x"], 2 * inputs()["x"].detach()]
        outputs = [found(each) for each in x]
        for output in reversed(outputs):
            output.square().sum().backward()
        results.append([p.grad for p in found.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
