"""Test the architecture: the direction of imports, the absence of cycles, and mirrored files with equal signatures."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

import pytest

import parity
from tests.daily import EVERY, PARTS, SERIES, of_other_parts

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "diptych.plans": "diptych/plans",
    "diptych.planner": "diptych/planner",
    "diptych_kernels": "kernels/diptych_kernels",
    "reference_torch": "reference_torch",
    "jax_impl": "jax_impl",
    "parity": "parity",
    "parity.cli": "parity/cli",
}
"""Folder of each package, by import name. A file belongs to the innermost of these folders."""

MAY_IMPORT = {
    "diptych.plans": {"diptych.plans"},
    "diptych.planner": {"diptych.plans", "diptych.planner"},
    "diptych_kernels": {"diptych.plans", "diptych_kernels"},
    "reference_torch": {"diptych.plans", "diptych_kernels", "reference_torch"},
    "jax_impl": {"diptych.plans", "diptych_kernels", "jax_impl"},
    "parity": FOLDERS.keys() - {"parity.cli"},
    "parity.cli": set(FOLDERS),
}

MODULES = {
    "autograd": set(),
    "linear_products": set(),
    "scaled_products": set(),
    "fp8": {"autograd", "groups", "linear_products", "operands", "scaled_products"},
    "grouped_fp8": {"autograd", "fp8", "operands"},
    "amax_history": {"autograd", "carry", "fp8"},
    "activation_storage": {"autograd", "fp8", "grouped_fp8", "linear_products", "ops", "recompute"},
    "history_adamw": set(),
    "history_updates": set(),
    "wrapped_forward": set(),
    "named_modules": {"traced_programs"},
    "traced_programs": set(),
    "recompute": {"carry", "traced_programs", "wrapped_forward", "named_modules"},
    "operands": set(),
    "attention": {"operands", "recompute"},
    "ops": {"attention", "autograd", "linear_products", "operands", "recompute"},
    "doubly_stochastic": {"autograd", "operands", "ops"},
    "hyper_connections": {"autograd", "doubly_stochastic", "operands", "ops", "recompute"},
    "added_connections": {"hyper_connections", "wrapped_forward", "named_modules"},
    "pending_sends": set(),
    "carry": set(),
    "context_parallel": {"autograd", "pending_sends", "groups", "carry", "ops", "recompute"},
    "delta_rule": {"autograd", "ops", "context_parallel"},
    "tensor_parallel": {"autograd", "groups", "ops", "recompute"},
    "modules": {
        "activation_storage",
        "amax_history",
        "fp8",
        "grouped_fp8",
        "linear_products",
        "ops",
        "tensor_parallel",
    },
    "documents": set(),
    "cache": {"ops"},
    "forward_context": {"aux_loss", "ops", "cache", "documents", "recompute", "tensor_parallel"},
    "linear_attention": {
        "ops",
        "cache",
        "context_parallel",
        "delta_rule",
        "documents",
        "forward_context",
        "modules",
        "recompute",
    },
    "transformer": {
        "ops",
        "cache",
        "context_parallel",
        "documents",
        "forward_context",
        "modules",
        "aux_loss",
        "mlp",
        "self_attention",
        "linear_attention",
        "hyper_connections",
        "recompute",
        "offload",
        "tensor_parallel",
    },
    "aux_loss": {"context_parallel", "documents"},
    "self_attention": {"ops", "cache", "context_parallel", "documents", "forward_context", "modules", "recompute"},
    "mlp": {"activation_storage", "aux_loss", "documents", "modules", "ops", "recompute"},
    "decoding": {"cache", "transformer"},
    "offload": {"linear_products", "ops", "recompute", "named_modules", "traced_programs"},
    "saving": {"autograd", "distributed_optimizer", "transformer", "offload"},
    "groups": set(),
    "staged_parameters": set(),
    "distributed_optimizer": {"autograd", "groups", "history_adamw", "staged_parameters"},
    "p2p": {"pending_sends"},
    "rank_pool": set(),
    "pipeline": {
        "activation_storage",
        "traced_programs",
        "autograd",
        "distributed_optimizer",
        "fp8",
        "linear_products",
        "modules",
        "ops",
        "context_parallel",
        "recompute",
        "groups",
        "p2p",
        "offload",
        "tensor_parallel",
        "staged_parameters",
        "wrapped_forward",
    },
    "stage": {"context_parallel", "tensor_parallel", "transformer", "offload"},
    "train": {
        "distributed_optimizer",
        "history_adamw",
        "history_updates",
        "fp8",
        "modules",
        "ops",
        "transformer",
        "saving",
        "groups",
        "p2p",
        "pipeline",
        "stage",
        "offload",
        "tensor_parallel",
    },
}
"""Modules of a backend, and the modules of the same backend each may import."""

TORCH_ONLY = {
    *(
        "history_adamw",
        "pending_sends",
        "scaled_products",
        "p2p",
        "rank_pool",
        "stage",
        "wrapped_forward",
    ),
}
"""Modules for backward functions, for forwards of instances, for processes that send each other messages, and for what
they call; JAX's step takes the single-device model."""

JAX_ONLY = {"carry", "history_updates", "linear_products", "named_modules", "staged_parameters", "traced_programs"}
"""Modules for what one program of all ranks passes on and how it stores parameters, for the classes of nnx modules, for
traced programs, and for matrix products that a traced backward leaves out."""

MIRRORED = (
    "operands",
    "attention",
    "ops",
    "doubly_stochastic",
    "hyper_connections",
    "added_connections",
    *(f"delta_rule/{name}" for name in ("api", "gates", "intra", "recurrent", "scan")),
    "modules",
    "aux_loss",
    "mlp",
    "self_attention",
    "documents",
    "cache",
    "forward_context",
    *(f"context_parallel/{name}" for name in ("contexts", "states", "layers", "zigzag")),
    "linear_attention",
    "transformer",
    "decoding",
    "saving",
    "train",
)

SHARED = {"recompute": ("name_value", "residual_report", "SavedValue", "recompute_modules", "ModuleBytes")}
"""Modules that are no mirrored files, and the names both have."""

_POLICY = "PyTorch hands its recompute manager on; JAX recomputes by the policy of jax.checkpoint around the layers"
_CARRY = "PyTorch changes a dictionary of states; JAX carries one state and an array that is only written"
ALLOWED_DIFFERENCES = {
    **dict.fromkeys(("scan.ChunkSequences", "scan.chunk_sequences", "scan.States", "scan.scan_chunks"), _CARRY),
    "scan.scan_chunks_backward": _CARRY,
    "hyper_connections.HyperConnectionModule.__call__(mhc_recompute_manager)": _POLICY,
    "hyper_connections.HyperConnectionModule.apply_h_post_with_checkpoint": _POLICY,
    "hyper_connections.HyperConnectionModule.read(mhc_recompute_manager)": _POLICY,
    "hyper_connections.HyperConnectionModule.read(merge_residual_gradient)": _POLICY,
    "mlp.MLP.__call__(recompute)": _POLICY,
    "mlp.MixtureOfExperts.__call__(recompute)": _POLICY,
    "mlp.Experts.__call__(recompute)": _POLICY,
    "forward_context.ForwardContext.recompute": _POLICY,
    "states.run_pipelined(anchor)": "autograd reaches the received state through an argument",
    "cache.empty_cache(device)": "JAX places arrays by its own default device",
    "train.Trainer.__init__(device)": "JAX places arrays by its own default device",
    **dict.fromkeys(
        ("saving.export_parameters(optimizer)", "saving.import_parameters(optimizer)"),
        "PyTorch's optimizer has the master weights; JAX's trainer joins them before and divides them after",
    ),
    "train.check_mesh": "JAX's step checks its mesh itself",
    "train.Trainer.model": "an attribute in PyTorch; in JAX put together from graph and parameters",
}


def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it; of ``from package import name`` both package and package.name."""
    return {name for names in import_statements(path) for name in names}


def import_statements(path: Path) -> list[tuple[str, ...]]:
    """Return the names that each import of a file may mean, the most exact one first.

    An import is a statement anywhere in the file, or a call of import_module or __import__ with a literal name.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name,) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__"):
                found.append((str(node.args[0].value),))
    return found


def files_of(package: str) -> list[Path]:
    """A package's files, but its own __init__."""
    return [path for path in sorted((ROOT / package).rglob("*.py")) if path != ROOT / package / "__init__.py"]


def package_of(name: str) -> str | None:
    """Return the innermost of FOLDERS that contains a module, or None."""
    return max((package for package in FOLDERS if f"{name}.".startswith(f"{package}.")), key=len, default=None)


def module_files() -> dict[str, Path]:
    """Return the file of every module in FOLDERS, by its import name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


@pytest.mark.parametrize("package", FOLDERS)
def test_packages_import_in_one_direction(package):
    files = [path for module, path in module_files().items() if package_of(module) == package]
    assert files
    for path in files:
        ours = {package_of(names[0]) for names in import_statements(path)} - {None}
        assert ours <= MAY_IMPORT[package], f"{path} imports {ours - MAY_IMPORT[package]}"


ALLOWED_OUTSIDE = {
    "diptych/plans": {"numpy", "ml_dtypes", "safetensors", "diptych"},
    "diptych/planner": {"numpy", "rich", "matplotlib", "diptych"},
}
"""The packages outside the standard library that the folders of ``diptych`` may import: no framework."""


@pytest.mark.parametrize("folder", ALLOWED_OUTSIDE)
def test_plans_and_planner_need_no_framework(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        outside = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names
        assert outside <= ALLOWED_OUTSIDE[folder], f"{path} imports {outside - ALLOWED_OUTSIDE[folder]}"


def test_every_module_of_the_wheel_belongs_to_a_package_with_a_direction():
    known = set(module_files().values()) | {ROOT / "diptych" / "__init__.py"}
    for folder in ("diptych", "kernels", "reference_torch", "jax_impl", "parity"):
        assert set((ROOT / folder).rglob("*.py")) <= known
    assert not (ROOT / "kernels" / "__init__.py").exists(), "a package kernels would hide that of Hugging Face"


def imported_modules(path: Path, modules: Container[str]) -> set[str]:
    """Return those of the given modules that a file imports; of ``from package import module`` the module alone."""
    found = (next((name for name in names if name in modules), None) for names in import_statements(path))
    return {name for name in found if name is not None}


def import_graph() -> dict[str, set[str]]:
    """Return the modules of this project that each module imports, anywhere in its file."""
    paths = module_files()
    return {module: imported_modules(path, paths) - {module} for module, path in paths.items()}


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle in order, or an empty list."""
    finished: set[str] = set()

    def visit(module: str, above: list[str]) -> list[str]:
        if module in above:
            return [*above[above.index(module) :], module]
        if module in finished:
            return []
        for other in sorted(graph[module]):
            if cycle := visit(other, [*above, module]):
                return cycle
        finished.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in sorted(graph))), [])


def test_no_module_imports_itself_through_others():
    """Imports under TYPE_CHECKING and inside functions count."""
    cycle = find_cycle(import_graph())
    assert not cycle, " -> ".join(cycle)
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]


@pytest.mark.parametrize("package", ["reference_torch", "jax_impl"])
def test_modules_import_downwards_only(package):
    modules = {path: path.relative_to(ROOT / package).parts[0].removesuffix(".py") for path in files_of(package)}
    assert set(modules.values()) == MODULES.keys() - (TORCH_ONLY if package == "jax_impl" else JAX_ONLY)
    for path, name in modules.items():
        used = {module.split(".")[1] for module in imports(path) if module.startswith(f"{package}.")}
        assert used <= MODULES[name] | {name}, f"{path} imports {used - MODULES[name]}"


@pytest.mark.parametrize(
    "source",
    [
        "import reference_torch.transformer",
        "from reference_torch import transformer",
        "from reference_torch.transformer import GPTModel",
        "def late():\n    from reference_torch import transformer",
        "if TYPE_CHECKING:\n    from reference_torch.transformer import GPTModel",
        "def late():\n    return importlib.import_module('reference_torch.transformer')",
        "late = __import__('reference_torch.transformer')",
    ],
)
def test_every_kind_of_import_is_seen(source, tmp_path):
    path = tmp_path / "ops.py"
    path.write_text(source + "\n")
    assert "reference_torch.transformer" in imports(path)
    assert imported_modules(path, {"reference_torch", "reference_torch.transformer"}) == {"reference_torch.transformer"}


def test_what_make_test_leaves_out_exists():
    for name in [*EVERY, *PARTS]:
        path, function = name.split("::")
        assert f"\ndef {function}(" in (ROOT / path).read_text(), name


@pytest.mark.parametrize("package", [*FOLDERS.values(), "tests", "benchmarks", "examples", "docs"])
def test_files_and_functions_stay_short(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        source = path.read_text()
        assert source.count("\n") <= 600, f"{path}: over 600 lines"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and "kernels" not in package:
                length = node.end_lineno - node.lineno + 1
                assert length <= 60, f"{path}: {node.name} has {length} lines"


def public_signatures(path: Path) -> list[tuple[str, str]]:
    """(name, signature) of public functions, classes and methods, in order; annotations left out."""
    found = []

    def add(prefix: str, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            name = "__call__" if node.name == "forward" else node.name
            if name.startswith("_") and not name.startswith("__"):
                return
            found.append((prefix + name, arguments(prefix + name, node.args)))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found.append((prefix + node.name, "class"))
            for member in node.body:
                add(f"{prefix}{node.name}.", member)
        elif isinstance(node, ast.AnnAssign) and "." in prefix:
            found.append((prefix + ast.unparse(node.target), "field"))

    def arguments(name: str, args: ast.arguments) -> str:
        for argument in [*args.posonlyargs, *args.args, *args.kwonlyargs]:
            argument.annotation = None
            if f"{path.stem}.{name}({argument.arg})" in ALLOWED_DIFFERENCES:
                has_none = len(args.args) - len(args.defaults)  # defaults belong to the last
                args.defaults.pop(args.args.index(argument) - has_none)
                args.args.remove(argument)
        return ast.unparse(args)

    for node in ast.parse(path.read_text()).body:
        add("", node)
    return [
        (name, text)
        for name, text in found
        if not any(f"{path.stem}.{name}.".startswith(f"{allowed}.") for allowed in ALLOWED_DIFFERENCES)
    ]


@pytest.mark.parametrize("module", MIRRORED)
def test_mirrored_files_have_equal_names_and_signatures(module):
    torch_side = public_signatures(ROOT / "reference_torch" / f"{module}.py")
    jax_side = public_signatures(ROOT / "jax_impl" / f"{module}.py")
    assert torch_side
    assert torch_side == jax_side


@pytest.mark.parametrize("module", SHARED)
def test_modules_that_are_not_mirrored_share_what_is_listed(module):
    sides = [importlib.import_module(f"{package}.{module}") for package in ("reference_torch", "jax_impl")]
    for name in SHARED[module]:
        ours, theirs = (getattr(side, name) for side in sides)
        assert [*inspect.signature(ours).parameters] == [*inspect.signature(theirs).parameters], name
        assert ours.__doc__.splitlines()[0].split(",")[0] == theirs.__doc__.splitlines()[0].split(",")[0], name


def test_twin_test_sees_a_renamed_argument(tmp_path):
    source = (ROOT / "jax_impl" / "ops.py").read_text()
    changed = tmp_path / "ops.py"
    changed.write_text(source.replace("epsilon: float", "eps: float"))
    assert public_signatures(changed) != public_signatures(ROOT / "reference_torch" / "ops.py")


def test_packages_export_the_same_names():
    import jax_impl
    import reference_torch

    assert reference_torch.__all__ == jax_impl.__all__
    assert len(reference_torch.__all__) <= 20
    for package in (reference_torch, jax_impl):
        for name in package.__all__:
            assert getattr(package, name).__module__.startswith(package.__name__)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = package.nothing


BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""

USE = """
import importlib, pathlib, {package}
for name in {package}.__all__:
    getattr({package}, name)
for path in pathlib.Path({package}.__file__).parent.glob("*.py"):
    importlib.import_module("{package}." + path.stem)
from parity.cli.main import main
code = main("train --backend {backend} --hidden-size 16 --num-layers 1 --seq-length 8 --train-iters 2 "
            "--eval-iters 1".split())
assert code == 0, code
assert not {{"triton"}} & set(sys.modules), "triton was imported"
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("backend", "package", "blocked"),
    [
        ("torch", "reference_torch", {"jax", "jaxlib", "flax", "optax", "jax_impl", "triton"}),
        pytest.param("jax", "jax_impl", {"torch", "reference_torch", "triton"}, marks=pytest.mark.slow),
    ],
)
def test_backend_trains_without_the_other_framework(backend, package, blocked, tmp_path):
    script = BLOCK.format(blocked=blocked) + USE.format(package=package, backend=backend)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout


ASK = """
from parity.cli.main import main
for command in ("train --backend {missing}", "compare", "locate torch.py:model jax.py:model"):
    assert main(command.split()) == 2, command
import parity
for name in parity.__all__:
    try:
        getattr(parity, name)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("missing", "blocked"), [("torch", {"torch"}), ("jax", {"jax", "jaxlib", "flax", "optax"})], ids=["torch", "jax"]
)
def test_missing_framework_is_named(missing, blocked):
    script = BLOCK.format(blocked=blocked) + ASK.format(missing=missing)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 3 + len(parity.__all__)
    for line in lines:
        assert f"expected an installed framework for {missing!r}, but {missing!r} is missing" in line
        assert line.endswith(f"pip install 'diptych[{missing}]'")


@pytest.mark.multiprocess
@pytest.mark.parametrize(("backend", "missing"), [("torch", "triton"), ("jax", "triton"), ("jax", "torch")])
def test_missing_package_of_the_kernels_is_named(backend, missing):
    """On a CPU the interpreter of the kernels computes in PyTorch, also for JAX."""
    sizes = "--impl triton --hidden-size 16 --num-layers 1 --seq-length 8 --train-iters 1 --eval-iters 1"
    command = f"train --backend {backend} {sizes}".split()
    script = BLOCK.format(blocked={missing}) + f"from parity.cli.main import main\nsys.exit(main({command}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"but {missing!r} is missing; pip install 'diptych[all]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("test", [*PARTS, "tests/x.py::test_short", "tests/x.py::test_slow"])
def test_the_parts_of_a_series_have_each_test_once(test):
    """Of the last one, the even numbers are slow, and the others run in every part."""
    names = [f"{test}[{number}]" for number in range(9)]
    are_slow = [test.endswith("slow") and number % 2 == 0 for number in range(9)]
    count = PARTS.get(test, 1 + sum(sum(are_slow) >= length for length in SERIES))
    runs = [
        [name for name, other in zip(names, of_other_parts(names, str(part), are_slow), strict=True) if not other]
        for part in range(count)
    ]
    fast = [name for name, is_slow in zip(names, are_slow, strict=True) if any(are_slow) and not is_slow]
    assert sorted(name for run in runs for name in run) == sorted(names + fast * (count - 1))
    assert len({len(run) for run in runs}) <= 2
    assert not any(of_other_parts(names, "all", are_slow))
    assert test in PARTS or not any(of_other_parts(names[:1], "0", [True])), "a single test"
