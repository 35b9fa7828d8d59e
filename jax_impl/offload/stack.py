"""Forward and backward of a model's layers, whose parameters move by a plan.

The whole stack is one ``jax.custom_vjp``. If JAX differentiated the fetches, it would save the device copy of every
layer for backward. Instead, forward saves the values that the recompute settings leave, and only the parameters of
layers that stay on the device until backward. Backward fetches the layers again and traces each layer a second time to
get its pull-back, whose leaves it replaces by the saved values. XLA removes operations that lead only to these leaves.

A layer whose block recomputes nothing saves the residuals of jax.vjp, except those computed from parameters alone (a
weight, its cast to bfloat16). A recomputed layer saves the named values that recompute_policy saves. Its replay (R, or
the start of B) begins behind a barrier that waits for the gradient. Otherwise XLA would merge forward and replay and
keep all values of the forward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters.partial_eval import DynamicJaxprTracer

from diptych.plans.activation_storage import dropped_values
from diptych.plans.config import TransformerConfig
from diptych.plans.offload import (
    ActivationMoves,
    Use,
    UseMoves,
    layer_storages,
    layers_that_stay,
    pass_uses,
    plan_activations,
    plan_offload,
    replays_layers,
    unmoved,
)
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from jax_impl.linear_products import LinearTap, LinearTaps
from jax_impl.offload.activations import Activations
from jax_impl.offload.layer import Differentiated, LayerAnalysis, LayerRule, Run, Saved
from jax_impl.offload.residency import Layers, Pass, Residency, active_pass, array_to_host, is_on_host

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
    """Run all layers of a model or a stage in order, and fetch each layer for its use.

    Inside a training step (``Pass.active``) the layers move by the plan of the step. Elsewhere they move by the plan of
    one forward, or of one forward and backward, and gradients are placed with the parameters.

    Args:
        layer_fn: ``layer_fn(number, parameters, hidden_states, inputs)`` runs a layer.
        config: configuration of the model.
        parameters: tree of each layer's parameters, on the host or the device, by number in the order of forward.
        hidden_states: input of the first layer. [B, T, D] or [B, T, S, D]
        inputs: further inputs of every layer: a tree, whose arrays get no gradient.
        vp_stage: index of the virtual stage within its rank; None: 0.
        pp_rank: pipeline rank; None: 0.

    Returns:
        The output of the last layer.
    """
    leaves = {number: jax.tree.leaves(tree) for number, tree in parameters.items()}
    structures = {number: jax.tree.structure(tree) for number, tree in parameters.items()}
    input_leaves, structure = jax.tree.flatten(inputs)
    arrays = {index: leaf for index, leaf in enumerate(input_leaves) if isinstance(leaf, Array)}

    def run(number: int, arrays: dict[int, Array], layer: list[Array], hidden_states: Array) -> Array:
        all_inputs = jax.tree.unflatten(structure, [arrays.get(index, leaf) for index, leaf in enumerate(input_leaves)])
        return layer_fn(number, jax.tree.unflatten(structures[number], layer), hidden_states, all_inputs)

    blocks = recompute_blocks(config, vp_stage, pp_rank)
    context = active_pass() or single_pass(config, blocks)
    stack = _Stack(run, config, blocks, context)
    run_stack = jax.custom_vjp(stack.infer)
    run_stack.defvjp(_traced(stack.forward), _traced(stack.backward))
    on_device = context.on_device if config.enable_tensor_offload else leaves
    return run_stack(
        leaves, on_device, _Taps(context.gradient_taps or {}, context.resident_taps), hidden_states, arrays
    )


def _traced(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that is compiled if it is called outside of jax.jit.

    The leaves of a pull-back are found by their index in a traced pull-back. The pull-back of an eager call has other
    leaves.
    """

    def run(*args: Any) -> Any:
        if any(isinstance(leaf, DynamicJaxprTracer) for leaf in jax.tree.leaves(args)):
            return rule(*args)
        return jax.jit(rule)(*args)

    return run


def single_pass(config: TransformerConfig, blocks: Sequence[RecomputeBlock], includes_backward: bool = True) -> Pass:
    """Return the pass of one forward and backward without a following use.

    Args:
        config: configuration of the model.
        blocks: recompute blocks with the layers.
        includes_backward: if True, backward follows at once. Otherwise no layer stays on the device between forward and
            backward, activations do not move, and the caller replaces ``gradient_taps``.
    """
    numbers = [number for block in blocks for number in block.layers]
    uses = pass_uses(numbers, True, blocks)
    forward = uses[: len(numbers)]
    backward = uses[len(numbers) :]
    if includes_backward:
        moves = _plan(config, uses)
        return Pass(moves[: len(numbers)], moves[len(numbers) :], activations=plan_saved(config, uses, blocks))
    return Pass(_plan(config, forward), _plan(config, backward), gradient_taps={})


def plan_saved(
    config: TransformerConfig, uses: Sequence[Use], blocks: Sequence[RecomputeBlock]
) -> dict[Use, ActivationMoves]:
    """Plan the moves of values saved for backward in one forward and backward; empty without activation offload.

    Args:
        config: configuration of the model.
        uses: uses of the layers.
        blocks: recompute blocks with the layers.
    """
    if not config.enable_activation_offload:
        return {}
    stay = layers_that_stay(config, blocks)
    plan = plan_activations(uses, config.tensor_offload_num_prefetch_layers, (), stay)
    return {moves.use: moves for moves in plan}


def _plan(config: TransformerConfig, uses: Sequence[Use]) -> tuple[UseMoves, ...]:
    """Return the moves of some uses; none without parameter offload."""
    if not config.enable_tensor_offload:
        return unmoved(uses)
    return plan_offload(uses, layer_storages(config), config.tensor_offload_num_prefetch_layers, then=()).moves


class _Taps(NamedTuple):
    """Unread arguments whose gradients are outputs of backward; see Pass."""

    gradients: dict[int, list[Any]]
    resident: Layers


class _Residuals(NamedTuple):
    """The residuals of the custom_vjp."""

    host_layers: Layers
    on_device: Layers
    """Layers that stay on the device from forward to backward."""
    saved: dict[int, Saved]
    arrays: dict[int, Array]


@dataclass(frozen=True, eq=False)
class _Stack:
    """The rules of the custom_vjp.

    Args:
        run: ``run(number, arrays, layer, hidden_states)`` runs a layer.
        config: configuration of the model.
        blocks: recompute blocks with all layers, in order.
        context: the pass.
    """

    run: Callable
    config: TransformerConfig
    blocks: Sequence[RecomputeBlock]
    context: Pass

    @cached_property
    def _rules(self) -> dict[int, LayerRule]:
        """Rules of all layers; layers with equal programs share the analysis of their program."""
        rules = {}
        analyses: dict[Any, LayerAnalysis] = {}
        for block in self.blocks:
            for number in block.layers:
                replays_alone = not replays_layers(block)
                saves_input = replays_alone or number == block.layers[0]
                replays_in_backward = replays_alone or number == block.layers[-1]
                analysis = analyses.setdefault(
                    (self.config.layer(number), block.kind, block.dropped, replays_in_backward), LayerAnalysis()
                )
                dropped = dropped_values(self.config, block)
                rules[number] = LayerRule(
                    block, dropped, saves_input, replays_in_backward, analysis, self.context.saves_named_only
                )
        return rules

    def infer(self, host_layers: Layers, on_device: Layers, taps: _Taps, x: Array, arrays: dict[int, Array]) -> Array:
        """Run a forward without a backward, if JAX differentiates nothing."""
        numbers = [number for block in self.blocks for number in block.layers]
        residency = Residency(host_layers, {} if self.config.enable_tensor_offload else on_device, self.context.trace)
        for moves in _plan(self.config, pass_uses(numbers, False)):
            number = moves.use.layer
            x = residency.begin(moves, x)
            with jax.named_scope(str(moves.use)):
                x = self.run(number, arrays, residency.on_device[number], x)
            residency.end(moves)
        return x

    def forward(
        self, host_layers: Layers, on_device: Layers, taps: _Taps, x: Array, arrays: dict[int, Array]
    ) -> tuple[Array, _Residuals]:
        """Run the forward and return its output and the residuals."""
        residency = Residency(host_layers, on_device, self.context.trace)
        activations = self._activations({})
        for moves in self.context.forward:
            x = residency.begin(moves, x)
            run, layer = self._bound(moves.use.layer, arrays, residency)
            with jax.named_scope(str(moves.use)):
                x, saved = self._rules[moves.use.layer].forward(run, layer, x)
            residency.end(moves)
            offloaded = self.config.layer(moves.use.layer).offload
            activations.end(moves.use, saved, self._rules[moves.use.layer].names, offloaded)
        return x, _Residuals(host_layers, residency.on_device, activations.saved, arrays)

    def backward(self, residuals: _Residuals, grad: Array) -> tuple[Layers | None, None, _Taps, Array, None]:
        """Return the gradients of parameters and input, and the layers that stay on the device."""
        residency = Residency(residuals.host_layers, residuals.on_device, self.context.trace)
        gradients = {}
        activations = self._activations(residuals.saved)
        x = None
        for moves in self.context.backward:
            number = moves.use.layer
            rule = self._rules[number]
            grad = residency.begin(moves, grad)
            grad = activations.begin(moves.use, grad)  # after the parameters, which this use waits for first
            saved = activations.saved[number]
            if rule.is_replayed(moves.use.kind):
                saved = saved if saved.x is not None else saved._replace(x=x)
                saved, grad = jax.lax.optimization_barrier((saved, grad))
            run, layer = self._bound(number, residuals.arrays, residency)
            with jax.named_scope(str(moves.use)):
                if moves.use.kind == "R":
                    x, activations.saved[number] = rule.replay(run, layer, saved)
                else:
                    gradients[number], grad = rule.backward(run, layer, saved, grad)
            residency.end(moves)
        if self.context.gradient_taps is None:
            return jax.tree.map(_into_memory_of, residuals.host_layers, gradients), None, _Taps({}, {}), grad, None
        if self.config.enable_tensor_offload:
            assert residency.on_device.keys() == self.context.resident_taps.keys(), (
                f"{[*residency.on_device]} stay on the device, not {[*self.context.resident_taps]}"
            )
        return (
            None,
            None,
            _Taps(gradients, {number: residency.on_device[number] for number in self.context.resident_taps}),
            grad,
            None,
        )

    def _activations(self, saved: Mapping[int, Saved]) -> Activations:
        """Return the saved values of the layers, with the plan of their moves."""
        return Activations(saved, self.context, self.config.activation_offload_min_bytes)

    def _bound(self, number: int, arrays: dict[int, Array], residency: Residency) -> tuple[Run, Differentiated]:
        """Return a layer on the device as a function of its differentiated arrays and its input, and these arrays.

        The differentiated arrays are the parameters, or zeros for the tap of a parameter (see Pass.gradient_taps). The
        function then reads the parameter itself, and the gradients of the tap are the operands of its gradient.
        """
        parameters = residency.on_device[number]
        requested = (self.context.gradient_taps or {}).get(number, parameters)
        tapped = {str(index): parameters[index] for index, item in enumerate(requested) if isinstance(item, LinearTap)}
        if not tapped:
            return partial(self.run, number, arrays), parameters

        def run(layer: Differentiated, x: Array) -> Array:
            input_leaves = [tapped.get(str(index), item) for index, item in enumerate(layer)]
            with LinearTaps(tapped, {index: layer[int(index)] for index in tapped}):
                return self.run(number, arrays, input_leaves, x)

        def tap(like: Array, weight: Array) -> Array:
            return jnp.zeros_like(weight, shape=like.shape, dtype=like.dtype)

        layer = [
            jax.tree.map(partial(tap, weight=parameter), item) if isinstance(item, LinearTap) else parameter
            for item, parameter in zip(requested, parameters, strict=True)
        ]
        return run, layer


def _into_memory_of(like: Array, grad: Array) -> Array:
    """Return the gradient, placed on the host if its parameter ``like`` is on the host."""
    return array_to_host(grad) if is_on_host(like) else grad
