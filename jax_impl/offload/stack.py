"""The layers of a model, forward and backward, with parameters that come and go as a plan says.

The whole stack is one ``jax.custom_vjp``. Were its fetches differentiated through, the device's copy of every layer
would be kept for backward; so forward hands backward what recompute settings keep of each layer, and no parameters
but those of layers that the plan leaves on the device through the turn. Backward fetches again, and traces each layer
a second time to have its pull-back around the kept values: what led only to those is dead, and compiled away.

A layer whose block recomputes nothing keeps what jax.vjp would, less what follows from parameters alone (a weight, its
cast to bfloat16). Of a recomputed layer the named values are kept that recompute_policy keeps. It is run again from
them (R, or the beginning of B), behind a barrier that waits for the gradient: else XLA would find both runs equal, and
keep all of the first.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
from jax import Array

from jax_impl.offload.device import Device, Layers, Pass, active_pass
from jax_impl.offload.layer import Kept, LayerRule
from plans.config import TransformerConfig
from plans.offload import Step, Use, layer_storages, pass_uses, plan_offload, replays_layers
from plans.recompute import recompute_blocks

LayerFunction = Callable[[int, Any, Array, Any], Array]


def run_offloaded(
    layer_fn: LayerFunction,
    config: TransformerConfig,
    parameters: Mapping[int, Any],
    hidden_states: Array,
    inputs: Any,
) -> Array:
    """All layers of a model in order, each fetched for its use.

    Inside a training step (``Pass.active``) the step's plan says what moves; elsewhere the plan of one forward, or of
    one forward and backward. Gradients of parameters then lie where the parameters do.

    Args:
        layer_fn: ``layer_fn(number, parameters, hidden_states, inputs)`` runs a layer.
        config: the model's.
        parameters: by layer's number, in the order of forward: a tree, in either memory.
        hidden_states: the first layer's input. [B, T, D] or [B, T, S, D]
        inputs: what every layer is given besides: a tree, whose arrays get no gradient.

    Returns:
        The last layer's output.
    """
    leaves = {number: jax.tree.leaves(tree) for number, tree in parameters.items()}
    structures = {number: jax.tree.structure(tree) for number, tree in parameters.items()}
    given, structure = jax.tree.flatten(inputs)
    arrays = {place: leaf for place, leaf in enumerate(given) if isinstance(leaf, Array)}

    def run(number: int, arrays: dict[int, Array], layer: list[Array], hidden_states: Array) -> Array:
        whole = jax.tree.unflatten(structure, [arrays.get(place, leaf) for place, leaf in enumerate(given)])
        return layer_fn(number, jax.tree.unflatten(structures[number], layer), hidden_states, whole)

    found = active_pass()
    numbers = tuple(parameters)
    stack = _Stack(run, config, numbers, found or _lone_pass(config, numbers), found is not None)
    through = jax.custom_vjp(stack.infer)
    through.defvjp(stack.forward, stack.backward)
    taps = _Taps(stack.told.gradients, stack.told.stay)
    return through(leaves, stack.told.here, taps, hidden_states, arrays)


def _lone_pass(config: TransformerConfig, numbers: tuple[int, ...]) -> Pass:
    """A forward and backward after which nothing is said to come."""
    steps = _plan(config, pass_uses(numbers, True, recompute_blocks(config)))
    return Pass(steps[: len(numbers)], steps[len(numbers) :], {}, {}, {})


def _plan(config: TransformerConfig, uses: Sequence[Use]) -> tuple[Step, ...]:
    return plan_offload(uses, layer_storages(config), config.tensor_offload_num_prefetch_layers, then=()).steps


class _Taps(NamedTuple):
    """Arguments that are not read, whose gradients hand something out of backward; see Pass."""

    gradients: Layers
    stay: Layers


class _Residuals(NamedTuple):
    """What forward leaves to backward."""

    hosts: Layers
    here: Layers
    """Layers that stay through the turn."""
    kept: dict[int, Kept]
    arrays: dict[int, Array]


class _Stack:
    """The rules of the custom_vjp.

    Args:
        run: ``run(number, arrays, layer, hidden_states)``.
        config: the model's.
        numbers: of the layers, in order.
        told: the pass.
        taps: whether gradients go to the pass's zeros, and not to the parameters.
    """

    def __init__(self, run: Callable, config: TransformerConfig, numbers: tuple[int, ...], told: Pass, taps: bool):
        self._run, self._config, self._numbers, self.told, self._has_taps = run, config, numbers, told, taps

    @cached_property
    def _rules(self) -> dict[int, LayerRule]:
        """How every layer is taken through forward and backward; layers that are alike share what is found out."""
        rules, alike = {}, {}
        for block in recompute_blocks(self._config):
            for number in block.layers:
                first = number == block.layers[0] or not replays_layers(block)
                last = number == block.layers[-1] or not replays_layers(block)
                known = alike.setdefault((self._config.layer(number), block.kind, block.dropped, last), {})
                rules[number] = LayerRule(block, first, last, known)
        return rules

    def infer(self, hosts: Layers, here: Layers, taps: _Taps, x: Array, arrays: dict[int, Array]) -> Array:
        """Forward that no backward follows."""
        device = Device(hosts, {}, self.told.trace)
        for step in _plan(self._config, pass_uses(self._numbers, False)):
            number = step.use.layer
            x = device.begin(step, x)
            with jax.named_scope(str(step.use)):
                x = self._run(number, arrays, device.here[number], x)
            device.end(step)
        return x

    def forward(
        self, hosts: Layers, here: Layers, taps: _Taps, x: Array, arrays: dict[int, Array]
    ) -> tuple[Array, _Residuals]:
        """Forward, and what is kept of it."""
        device, kept = Device(hosts, here, self.told.trace), {}
        for step in self.told.forward:
            number = step.use.layer
            x = device.begin(step, x)
            run = partial(self._run, number, arrays)
            with jax.named_scope(str(step.use)):
                x, kept[number] = self._rules[number].forward(run, device.here[number], x)
            device.end(step)
        return x, _Residuals(hosts, device.here, kept, arrays)

    def backward(self, residuals: _Residuals, grad: Array) -> tuple[Layers | None, None, _Taps, Array, None]:
        """Gradients of parameters and input, and what stays on the device."""
        device, gradients = Device(residuals.hosts, residuals.here, self.told.trace), {}
        kept, x = dict(residuals.kept), None
        for step in self.told.backward:
            number, rule = step.use.layer, self._rules[step.use.layer]
            run = partial(self._run, number, residuals.arrays)
            layer = kept[number]
            if rule.runs_again(step.use.kind):
                layer = layer if layer.x is not None else layer._replace(x=x)
                layer, grad = jax.lax.optimization_barrier((layer, grad))
            grad = device.begin(step, grad)
            with jax.named_scope(str(step.use)):
                if step.use.kind == "R":
                    x, kept[number] = rule.replay(run, device.here[number], layer)
                else:
                    gradients[number], grad = rule.backward(run, device.here[number], layer, grad)
            device.end(step)
        if not self._has_taps:
            return jax.tree.map(_into_memory_of, residuals.hosts, gradients), None, _Taps({}, {}), grad, None
        assert device.here.keys() == self.told.stay.keys(), f"{[*device.here]} stay, not {[*self.told.stay]}"
        return None, None, _Taps(gradients, device.here), grad, None


def _into_memory_of(like: Array, grad: Array) -> Array:
    """The gradient, on the host if that is where what it belongs to is."""
    return jax.device_put(grad, jax.memory.Space.Host) if _is_on_host(like) else grad


def _is_on_host(array: Array) -> bool:
    return jax.typeof(array).memory_space == jax.memory.Space.Host
