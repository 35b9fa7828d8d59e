"""Training of random nnx models, with techniques and without, in transformations of JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_impl.added_connections import add_hyper_connections
from jax_impl.offload import OffloadedModules, offload_modules
from jax_impl.recompute import recompute_modules
from tests.fuzz.grammars._modules_jax_models import Model, ModelProgram, Technique, batch

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-2)),
}
ADDED = "hyper_connection"
REMOVALS = ("remove", "remove twice")


def apply(model: Model, technique: Technique) -> Any:
    """Add a technique to a model and return its handle."""
    settings = dict(technique.settings)
    if technique.name == "recompute":
        return recompute_modules(model, {pattern: [*technique.inner] for pattern in technique.patterns})
    if technique.name == "offload":
        return offload_modules(model, [*technique.patterns], **settings)
    return add_hyper_connections(model, [*technique.patterns], **settings)


def remove(handle: Any) -> None:
    """Undo a technique."""
    handle.close() if isinstance(handle, OffloadedModules) else handle.remove()


def is_usual(path: Any, value: Any) -> bool:
    """Select parameters that the plain model has too."""
    return ADDED not in path and isinstance(value, nnx.Variable) and issubclass(type(value), nnx.Param)


def on_device(tree: Any) -> Any:
    """Return a tree with all arrays on the device, as numbers that can be compared."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return jax.device_put(x, jax.memory.Space.Device)

    return jax.tree.map(leaf, tree)


class Training:
    """A model, its optimizer and its techniques."""

    def __init__(self, p: ModelProgram, is_plain: bool) -> None:
        self.p = p
        self.model = Model(p)
        self.techniques = () if is_plain else p.techniques
        self.handles: list[Any] = []
        if p.late:
            self.add()
        self.optimizer = nnx.Optimizer(self.model, OPTIMIZERS[p.optimizer](), wrt=is_usual)
        if not p.late:
            self.add()
        self.batch = batch(p)

    def add(self) -> None:
        """Add all techniques."""
        self.handles = [apply(self.model, each) for each in self.techniques]

    def happen(self, event: str) -> None:
        """Do what happens before a step."""
        if event in ("remove", "remove twice", "again"):
            for handle in reversed(self.handles):
                remove(handle)
                if event == "remove twice":
                    remove(handle)
            if event == "again":
                nnx.update(self.optimizer, OffloadedModules.fetch(nnx.state(self.optimizer)))
                self.add()
            elif self.handles:
                nnx.update(self.optimizer, OffloadedModules.fetch(nnx.state(self.optimizer)))
                self.handles = []
        elif event == "eval":
            self.model.eval()
        elif event == "train":
            self.model.train()
        elif event == "clone":
            nnx.clone(self.model)(self.batch)

    @property
    def offload(self) -> OffloadedModules | None:
        """The handle of offload, if any."""
        return next((handle for handle in self.handles if isinstance(handle, OffloadedModules)), None)

    def loss(self, model: Any, x: Any) -> Any:
        """Return a loss whose cotangents differ."""
        y, more = model(x)
        value = (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum() + sum(more)
        if self.p.penalty:
            weights = OffloadedModules.fetch(nnx.state(model, is_usual))
            value = value + 0.01 * sum((weight**2).sum() for weight in jax.tree.leaves(weights))
        return value

    def gradients(self, model: Any, x: Any) -> Any:
        """Return the loss and the gradients of parameters, and of x if it has one."""
        wrt = nnx.DiffState(0, is_usual)
        loss = nnx.remat(self.loss) if self.p.surroundings == "checkpoint" else self.loss
        if self.p.embedded != "none":
            value, found = nnx.value_and_grad(loss, argnums=wrt)(model, x)
            return value, found, ()
        value, (found, of_x) = nnx.value_and_grad(loss, argnums=(wrt, 1))(model, x)
        return value, found, of_x

    def update(self, model: Any, optimizer: Any, x: Any) -> Any:
        """Run one step."""
        value, found, of_x = self.gradients(model, x)
        handle = self.offload
        if handle is None:
            optimizer.update(model, found)
        else:
            handle.update(optimizer, model, found)
        return value, found, of_x

    def step(self) -> Any:
        """Run one step in the surroundings of the program."""
        kind = self.p.surroundings
        if kind in ("eager", "checkpoint"):
            return self.update(self.model, self.optimizer, self.batch)
        if kind == "jit":
            return nnx.jit(self.update)(self.model, self.optimizer, self.batch)
        if kind == "vmap":
            return self._mapped()
        return self._functional(kind)

    def _mapped(self) -> Any:
        graph, state = nnx.split(self.model)

        def one(x: Any) -> Any:
            return self.gradients(nnx.merge(graph, state, copy=True), x)

        return jax.vmap(one)(jnp.stack([self.batch, self.batch[::-1]]))

    def _functional(self, kind: str) -> Any:
        """Run steps as a function of the state: compiled, with donated state, or in a scan."""
        graph, state = nnx.split(self.model)
        other_graph, other_state = nnx.split(self.optimizer)

        def one(state: Any, other_state: Any, x: Any) -> Any:
            model = nnx.merge(graph, state, copy=True)
            optimizer = nnx.merge(other_graph, other_state, copy=True)
            found = self.update(model, optimizer, x)
            return nnx.state(model), nnx.state(optimizer), found

        if kind == "scan":
            batches = jnp.stack([self.batch, self.batch[::-1]])
            carry, found = jax.lax.scan(
                lambda c, x: (lambda r: (r[:2], r[2][0]))(one(*c, x)), (state, other_state), batches
            )
            state, other_state = carry
        else:
            compiled = jax.jit(one, donate_argnums=(0,) if kind == "donate" else ())
            state, other_state, found = compiled(state, other_state, self.batch)
        nnx.update(self.model, state)
        nnx.update(self.optimizer, other_state)
        return found


def run_model(p: ModelProgram, is_plain: bool) -> dict[str, Any]:
    """Return all that the steps of a program compute, and the state after each."""
    training = Training(p, is_plain)
    found: dict[str, Any] = {}
    for number, event in enumerate(p.events):
        training.happen(event)
        found |= _arrays(f"step {number}", training.step())
        found |= _arrays(f"state {number}", nnx.state(training.model))
        calls = [
            node.calls for _, node in nnx.iter_graph(training.model) if isinstance(getattr(node, "calls", None), int)
        ]
        found[f"calls {number}"] = np.array(calls, int)
    found |= _arrays("optimizer", nnx.state(training.optimizer))
    if p.events[-1] in REMOVALS:
        found["structure"] = nnx.graphdef(training.model)
    return found


def _arrays(name: str, tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree that the plain model has too, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(on_device(tree))
    named = {f"{name} {jax.tree_util.keystr(path)}": np.array(leaf) for path, leaf in leaves}
    return {path: leaf for path, leaf in named.items() if ADDED not in path}
