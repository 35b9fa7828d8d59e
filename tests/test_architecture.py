"""Test the architecture: the direction of imports, the absence of cycles, and mirrored files with equal signatures."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "diptych.plans": "diptych/plans",
    "diptych.planner": "diptych/planner",
    "diptych_kernels": "kernels/diptych_kernels",
    "reference_torch": "reference_torch",
    "jax_impl": "jax_impl",
    "parity": "parity",
}
"""Folder of each package, by import name."""

MAY_IMPORT = {
    "diptych.plans": {"diptych.plans"},
    "diptych.planner": {"diptych.plans", "diptych.planner"},
    "diptych_kernels": {"diptych.plans", "diptych_kernels"},
    "reference_torch": {"diptych.plans", "diptych_kernels", "reference_torch"},
    "jax_impl": {"diptych.plans", "diptych_kernels", "jax_impl"},
    "parity": set(FOLDERS),
}

MODULES = {
    "autograd": set(),
    "recompute": {"carry"},
    "operands": set(),
    "attention": {"operands", "recompute"},
    "ops": {"attention", "autograd", "operands", "recompute"},
    "hyper_connections": {"autograd", "operands", "ops", "recompute"},
    "pending_sends": set(),
    "carry": set(),
    "context_parallel": {"autograd", "pending_sends", "groups", "carry", "ops", "recompute"},
    "delta_rule": {"autograd", "ops", "context_parallel"},
    "modules": {"ops"},
    "documents": set(),
    "cache": {"ops"},
    "forward_context": {"ops", "cache", "documents", "recompute"},
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
        "linear_attention",
        "hyper_connections",
        "recompute",
        "offload",
    },
    "decoding": {"cache", "transformer"},
    "offload": {"ops", "recompute"},
    "saving": {"transformer", "offload"},
    "groups": set(),
    "p2p": {"pending_sends"},
    "rank_pool": set(),
    "pipeline": {"ops", "context_parallel", "recompute", "groups", "p2p", "offload"},
    "stage": {"context_parallel", "transformer", "offload"},
    "train": {"ops", "transformer", "saving", "groups", "p2p", "pipeline", "stage", "offload"},
}
"""Modules of a backend, and the modules of the same backend each may import."""

TORCH_ONLY = {"autograd", "pending_sends", "p2p", "rank_pool", "stage"}
"""Modules for backward functions, for processes that send each other messages, and for what they call; JAX's step takes
the model whole."""

JAX_ONLY = {"carry"}
"""A module for what one program of all ranks has to be told."""

MIRRORED = (
    "operands",
    "attention",
    "ops",
    "hyper_connections",
    *(f"delta_rule/{name}" for name in ("api", "gates", "intra", "recurrent", "scan")),
    "modules",
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

SHARED = {"recompute": ("name_value", "residual_report", "SavedValue")}
"""Modules that are no mirrored files, and the names both have."""

_POLICY = "PyTorch hands its recompute manager on; JAX recomputes by the policy of jax.checkpoint around the layers"
_CARRY = "PyTorch changes a dictionary of states; JAX carries one state and an array that is only written"
ALLOWED_DIFFERENCES = {
    **dict.fromkeys(("scan.Sequences", "scan.sequences_of", "scan.States", "scan.scan_chunks"), _CARRY),
    "scan.scan_chunks_backward": _CARRY,
    "hyper_connections.HyperConnectionModule.__call__(mhc_recompute_manager)": _POLICY,
    "hyper_connections.HyperConnectionModule.apply_h_post_with_checkpoint": _POLICY,
    "hyper_connections.HyperConnectionModule.read(mhc_recompute_manager)": _POLICY,
    "transformer.MLP.__call__(recompute)": _POLICY,
    "forward_context.ForwardContext.recompute": _POLICY,
    "states.run_pipelined(anchor)": "autograd reaches the received state through an argument",
    "cache.empty_cache(device)": "JAX places arrays by its own default device",
    "train.Trainer.__init__(device)": "JAX places arrays by its own default device",
    "train.check_mesh": "JAX's step checks its mesh itself",
    "train.Trainer.model": "an attribute in PyTorch; in JAX put together from graph and parameters",
}


def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files_of(package: str) -> list[Path]:
    """A package's files, but its own __init__."""
    return [path for path in sorted((ROOT / package).rglob("*.py")) if path != ROOT / package / "__init__.py"]


@pytest.mark.parametrize("package", FOLDERS)
def test_packages_import_in_one_direction(package):
    files = sorted((ROOT / FOLDERS[package]).rglob("*.py"))
    assert files
    for path in files:
        ours = {other for other in FOLDERS for name in imports(path) if f"{name}.".startswith(f"{other}.")}
        assert ours <= MAY_IMPORT[package], f"{path} imports {ours - MAY_IMPORT[package]}"


def test_plans_need_only_numpy_safetensors_and_the_standard_library():
    for path in sorted((ROOT / "diptych" / "plans").rglob("*.py")):
        outside = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names
        assert outside <= {"numpy", "safetensors", "diptych"}, f"{path} imports {outside}"


def imported_modules(path: Path, modules: Container[str]) -> set[str]:
    """Return those of the given modules that a file imports; of ``from package import module`` the module alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else str(node.module) for name in names}
    return {name for name in found if name in modules}


def import_graph() -> dict[str, set[str]]:
    """Return the modules of this project that each module imports, anywhere in its file."""
    paths = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            paths[".".join([package, *parts]).removesuffix(".__init__")] = path
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


def test_room_test_sees_a_room_imported_by_name(tmp_path):
    path = tmp_path / "ops.py"
    path.write_text("def late():\n    from reference_torch import transformer\n")
    assert "reference_torch.transformer" in imports(path)


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


@pytest.mark.multiprocess
def test_missing_framework_is_named():
    script = BLOCK.format(blocked={"torch"}) + (
        "from parity.cli.main import main\nsys.exit(main(['train', '--backend', 'torch']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 2
    assert "expected an installed framework for 'torch'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
