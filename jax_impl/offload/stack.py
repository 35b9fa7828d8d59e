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
import jax.numpy as jnp
from jax import Array

from diptych.plans.config import TransformerConfig
from diptych.plans.offload import (
    ActivationStep,
    Step,
    Use,
    layer_storages,
    pass_uses,
    plan_activations,
    plan_offload,
    replays_layers,
    unmoved,
)
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from jax_impl.offload.activations import Activations
from jax_impl.offload.device import Device, Layers, Pass, active_pass, is_on_host
from jax_impl.offload.layer import Kept, Layer, LayerRule, Run
from jax_impl.ops import _LinearTaps

LayerFunction = Callable[[int, Any, Array, Any], Array]


def run_offloaded(
    layer_fn: LayerFunction,
    config: TransformerConfig,
    parameters: Mapping[int, Any],
    hidden_states: Array,
    inputs: Any,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> Array:
    """All layers of a model, or of a stage, in order, each fetched for its use.

    Inside a training step (``Pass.active``) the step's plan says what moves; elsewhere the plan of one forward, or of
    one forward and backward. Gradients of parameters then lie where the parameters do.

    Args:
        layer_fn: ``layer_fn(number, parameters, hidden_states, inputs)`` runs a layer.
        config: the model's.
        parameters: by layer's number, in the order of forward: a tree, in either memory.
        hidden_states: the first layer's input. [B, T, D] or [B, T, S, D]
        inputs: what every layer is given besides: a tree, whose arrays get no gradient.
        vp_stage: index of the virtual stage within its rank; None: 0.
        pp_rank: pipeline rank; None: 0.

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

    blocks = recompute_blocks(config, vp_stage, pp_rank)
    told = active_pass() or lone_pass(config, blocks)
    stack = _Stack(run, config, blocks, told)
    through = jax.custom_vjp(stack.infer)
    through.defvjp(stack.forward, stack.backward)
    here = told.here if config.enable_tensor_offload else leaves
    return through(leaves, here, _Taps(told.gradients or {}, told.stay), hidden_states, arrays)


def lone_pass(config: TransformerConfig, blocks: Sequence[RecomputeBlock], turns: bool = True) -> Pass:
    """A forward and backward after which nothing is said to come.

    Args:
        config: the model's.
        blocks: the layers.
        turns: whether backward follows at once; else nothing stays on the device between them, activations do not move,
            and it is for the caller to say where gradients go.
    """
    numbers = [number for block in blocks for number in block.layers]
    uses = pass_uses(numbers, True, blocks)
    forward, backward = uses[: len(numbers)], uses[len(numbers) :]
    if turns:
        steps = _plan(config, uses)
        return Pass(steps[: len(numbers)], steps[len(numbers) :], activations=plan_kept(config, uses, blocks))
    return Pass(_plan(config, forward), _plan(config, backward), gradients={})


def plan_kept(
    config: TransformerConfig, uses: Sequence[Use], blocks: Sequence[RecomputeBlock]
) -> dict[Use, ActivationStep]:
    """When what is kept of layers moves, in one forward and backward; empty without activation offload."""
    if not config.enable_activation_offload:
        return {}
    dropped = [number for block in blocks if block.kind == "full" for number in block.layers]
    steps = plan_activations(uses, config.tensor_offload_num_prefetch_layers, (), dropped)
    return {step.use: step for step in steps}


def _plan(config: TransformerConfig, uses: Sequence[Use]) -> tuple[Step, ...]:
    if not config.enable_tensor_offload:
        return unmoved(uses)
    return plan_offload(uses, layer_storages(config), config.tensor_offload_num_prefetch_layers, then=()).steps


class _Taps(NamedTuple):
    """Arguments that are not read, whose gradients hand something out of backward; see Pass."""

    gradients: dict[int, list[Any]]
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
        blocks: all layers, in order.
        told: the pass.
    """

    def __init__(self, run: Callable, config: TransformerConfig, blocks: Sequence[RecomputeBlock], told: Pass) -> None:
        self._run, self._config, self._blocks, self._told = run, config, blocks, told

    @cached_property
    def _rules(self) -> dict[int, LayerRule]:
        """How every layer is taken through forward and backward; layers that are alike share what is found out."""
        rules, alike = {}, {}
        for block in self._blocks:
            for number in block.layers:
                first = number == block.layers[0] or not replays_layers(block)
                last = number == block.layers[-1] or not replays_layers(block)
                known = alike.setdefault((self._config.layer(number), block.kind, block.dropped, last), {})
                rules[number] = LayerRule(block, first, last, known, self._told.named)
        return rules

    def infer(self, hosts: Layers, here: Layers, taps: _Taps, x: Array, arrays: dict[int, Array]) -> Array:
        """Forward that no backward follows."""
        numbers = [number for block in self._blocks for number in block.layers]
        device = Device(hosts, {} if self._config.enable_tensor_offload else here, self._told.trace)
        for step in _plan(self._config, pass_uses(numbers, False)):
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
        device, activations = Device(hosts, here, self._told.trace), self._activations({})
        for step in self._told.forward:
            x = device.begin(step, x)
            run, layer = self._bound(step.use.layer, arrays, device)
            with jax.named_scope(str(step.use)):
                x, kept = self._rules[step.use.layer].forward(run, layer, x)
            activations.end(step.use, kept)
            device.end(step)
        return x, _Residuals(hosts, device.here, activations.kept, arrays)

    def backward(self, residuals: _Residuals, grad: Array) -> tuple[Layers | None, None, _Taps, Array, None]:
        """Gradients of parameters and input, and what stays on the device."""
        device, gradients = Device(residuals.hosts, residuals.here, self._told.trace), {}
        activations, x = self._activations(residuals.kept), None
        for step in self._told.backward:
            number, rule = step.use.layer, self._rules[step.use.layer]
            grad = activations.begin(step.use, grad)
            kept = activations.kept[number]
            if rule.runs_again(step.use.kind):
                kept = kept if kept.x is not None else kept._replace(x=x)
                kept, grad = jax.lax.optimization_barrier((kept, grad))
            grad = device.begin(step, grad)
            run, layer = self._bound(number, residuals.arrays, device)
            with jax.named_scope(str(step.use)):
                if step.use.kind == "R":
                    x, activations.kept[number] = rule.replay(run, layer, kept)
                else:
                    gradients[number], grad = rule.backward(run, layer, kept, grad)
            device.end(step)
        if self._told.gradients is None:
            return jax.tree.map(_into_memory_of, residuals.hosts, gradients), None, _Taps({}, {}), grad, None
        if self._config.enable_tensor_offload:
            assert device.here.keys() == self._told.stay.keys(), (
                f"{[*device.here]} stay on the device, not {[*self._told.stay]}"
            )
        return None, None, _Taps(gradients, {number: device.here[number] for number in self._told.stay}), grad, None

    def _activations(self, kept: Mapping[int, Kept]) -> Activations:
        return Activations(kept, self._told, self._config.activation_offload_min_bytes)

    def _bound(self, number: int, arrays: dict[int, Array], device: Device) -> tuple[Run, Layer]:
        """A layer that is on the device, as a function of its input and of what gradients are asked for; and that."""
        parameters = device.here[number]
        asked = (self._told.gradients or {}).get(number, parameters)
        tapped = {str(place): parameters[place] for place, item in enumerate(asked) if isinstance(item, tuple)}
        if not tapped:
            return partial(self._run, number, arrays), parameters

        def run(layer: Layer, x: Array) -> Array:
            given = [tapped.get(str(place), item) for place, item in enumerate(layer)]
            with _LinearTaps(tapped, {place: layer[int(place)] for place in tapped}):
                return self._run(number, arrays, given, x)

        def tap(like: Array, weight: Array) -> Array:
            return jnp.zeros_like(weight, shape=like.shape, dtype=like.dtype)

        layer = [
            tuple(tap(like, parameter) for like in item) if isinstance(item, tuple) else parameter
            for item, parameter in zip(asked, parameters, strict=True)
        ]
        return run, layer


def _into_memory_of(like: Array, grad: Array) -> Array:
    """The gradient, on the host if that is where what it belongs to is."""
    return jax.device_put(grad, jax.memory.Space.Host) if is_on_host(like) else grad
