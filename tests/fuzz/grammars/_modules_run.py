"""The actions of a user on a model, with and without techniques that are applied from outside."""

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from reference_torch.added_connections import add_hyper_connections
from reference_torch.offload import offload_modules
from reference_torch.pipeline import split_model
from reference_torch.recompute import recompute_modules
from tests.fuzz.grammars._modules_model import TOKENS, Broken, Found, Program, Technique, build, core

ADDED = ".hyper_connection."
BATCH = 2
LENGTH = 4


class Run:
    """One of the two models.

    Args:
        program: the program.
        techniques: what is applied to this model.
    """

    def __init__(self, program: Program, techniques: tuple[Technique, ...]) -> None:
        self.program = program
        self.techniques = techniques
        self.model = build(program)
        self.stages: list[nn.Module] | None = None
        self.handles: list[Any] = []
        self.is_copy = False
        self.seen: list[Tensor] = []
        self.make_optimizer()

    def act(self, name: str, number: int) -> dict[str, Any] | Exception:
        """Execute an action and return its result or its exception."""
        torch.manual_seed(number)
        for part in self.parts:
            core(part).generator.manual_seed(number)
        try:
            found = getattr(self, "_" + name.replace(" ", "_"))(number)
        except Exception as error:
            if not isinstance(error, Broken) or not name.startswith("raise in"):
                return error
            found = {}
        finally:
            self._break_in(None, "")
        if name.startswith("raise in"):  # the engine may have added a part of the gradients
            self._zero_grad(True)
        plain = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in (found or {}).items()}
        return plain | {"state of the random numbers": torch.get_rng_state()}

    def read(self) -> dict[str, Any]:
        """Return parameters, gradients, buffers and the names of the state."""
        own = {k: p for k, p in self.named_parameters().items() if ADDED not in k}
        found: dict[str, Any] = {f"parameter {k}": p.detach().clone() for k, p in own.items()}
        found |= {f"gradient {k}": None if p.grad is None else p.grad.clone() for k, p in own.items()}
        found |= {
            f"buffer {k}": b.clone() for part in self.parts for k, b in part.named_buffers(remove_duplicate=False)
        }
        names = {name for part in self.parts for name in part.state_dict() if ADDED not in name}
        return found | {"state_dict": sorted(names)}

    def close(self) -> None:
        """Undo all techniques."""
        while self.handles:
            handle = self.handles.pop()
            handle.close() if hasattr(handle, "close") else handle.remove()
        self.stages = None if not self.is_copy else self.stages

    @property
    def parts(self) -> list[nn.Module]:
        """The stages, or the model."""
        return [self.model] if self.stages is None else self.stages

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the model or of all stages, with each of their names."""
        return {k: p for part in self.parts for k, p in part.named_parameters(remove_duplicate=False)}

    def make_optimizer(self) -> None:
        """Make a new optimizer for the parameters of the plain model."""
        parameters = {id(p): p for k, p in self.named_parameters().items() if p.requires_grad and ADDED not in k}
        if self.program.optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW([*parameters.values()], lr=0.01, foreach=True)
        else:
            self.optimizer = torch.optim.SGD([*parameters.values()], lr=0.05, momentum=0.9, foreach=True)

    # Techniques.

    def apply(self) -> None:
        """Apply the techniques in their order."""
        for technique in self.techniques:
            settings = dict(technique.settings)
            names = [name for name, _ in technique.patterns]
            if technique.name == "split":
                example = self._batch(0) if settings["example"] else ((), {})
                options = {"example_args": example[0], "example_kwargs": example[1]} if settings["example"] else {}
                self.stages = split_model(self.model, names, **options)
            elif technique.name == "hyper":
                self.handles.append(add_hyper_connections(self.model, names, **settings))
            elif technique.name == "recompute":
                for part, chosen in self._chosen(technique):
                    self.handles.append(recompute_modules(part, chosen))
            else:
                for part, chosen in self._chosen(technique):
                    self.handles.append(offload_modules(part, [*chosen], **settings))

    def _chosen(self, technique: Technique) -> Iterator[tuple[nn.Module, dict[str, list[str]]]]:
        """Yield each part of the model with the patterns of modules that it is the first to own."""
        done: set[str] = set()
        for part in self.parts:
            own = [(outer, inner) for outer, inner in technique.patterns if outer not in done]
            chosen = {outer: [*inner] for outer, inner in own if self.stages is None or self._owns(part, outer)}
            done |= {*chosen}
            if chosen:
                yield part, chosen

    @staticmethod
    def _owns(stage: nn.Module, name: str) -> bool:
        try:
            return any(True for _ in stage.get_submodule(name).parameters())
        except AttributeError:
            return False

    # Parts of actions.

    def _batch(self, number: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(number % 7)
        ids = torch.randint(TOKENS, (BATCH, LENGTH), generator=generator)
        if self.program.arguments == "none":
            return (ids,), {}
        mask = torch.tensor([[False, False, True, False], [False, False, False, True]])
        return ((ids, mask), {}) if self.program.arguments == "positional" else ((ids,), {"mask": mask})

    def _forward(self, number: int, model: Any = None) -> list[Tensor]:
        args, kwargs = self._batch(number)
        if self.stages is None:
            value = (self.model if model is None else model)(*args, **kwargs)
        else:
            value = self.stages[0](*args, **kwargs)
            for stage in self.stages[1:]:
                value = stage(*value)
        value = vars(value) if isinstance(value, Found) else value
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]

    @staticmethod
    def _loss(outputs: list[Tensor]) -> Tensor:
        total: Any = 0
        for output in outputs:
            weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).cos().view(output.shape)
            total = total + (output * weights).mean() + 0.1 * output.square().mean()
        return total

    def _train(self, number: int, model: Any = None) -> dict[str, Any]:
        outputs = self._forward(number, model)
        loss = self._loss(outputs)
        loss.backward()
        return {"loss": loss} | {f"output {k}": output for k, output in enumerate(outputs)}

    def _zero_grad(self, set_to_none: bool) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def _update(self, number: int) -> None:
        managers = [handle for handle in self.handles if hasattr(handle, "step")]
        if len(managers) == 1 and number % 3:
            managers[0].step(self.optimizer)
        else:
            self.optimizer.step()

    def _break_in(self, number: int | None, where: str) -> None:
        for part in self.parts:
            blocks = core(part).listed
            for k, block in enumerate(blocks):
                if number is None or k == number % len(blocks):
                    block.breaks = where

    def _switch(self, training: bool) -> None:
        for part in self.parts:
            part.train(training)

    # Actions.

    def _step(self, number: int) -> dict[str, Any]:
        self._zero_grad(bool(number % 2))
        found = self._train(number)
        self._update(number)
        return found

    def _accumulate(self, number: int) -> dict[str, Any]:
        self._zero_grad(bool(number % 2))
        found = self._train(number)
        found |= {f"second {k}": v for k, v in self._train(number + 1).items()}
        self._update(number)
        return found

    def _forwards(self, number: int) -> dict[str, Any]:
        """Run several forwards before their backwards."""
        losses = [self._loss(self._forward(number + k)) for k in range(2 + number % 2)]
        found = {f"loss {k}": loss for k, loss in enumerate(losses)}
        if number % 3 == 0:
            sum(losses[1:], losses[0]).backward()
        else:
            for loss in losses[:: -1 if number % 3 == 1 else 1]:
                loss.backward()
        return found

    def _eval(self, number: int) -> dict[str, Any]:
        self._switch(False)
        try:
            if number % 2:
                return self._train(number)
            return {"loss": self._loss(self._forward(number))}
        finally:
            self._switch(True)

    def _no_grad(self, number: int) -> dict[str, Any]:
        with torch.no_grad():
            return {"loss": self._loss(self._forward(number))}

    def _inference(self, number: int) -> dict[str, Any]:
        with torch.inference_mode():
            return {"loss": self._loss(self._forward(number)).clone()}

    def _checkpoint(self, number: int) -> dict[str, Any]:
        loss: Any = checkpoint(lambda: self._loss(self._forward(number)), use_reentrant=False)
        loss.backward()
        return {"loss": loss}

    def _save_on_cpu(self, number: int) -> dict[str, Any]:
        with torch.autograd.graph.save_on_cpu():
            loss = self._loss(self._forward(number))
        loss.backward()
        return {"loss": loss}

    def _autocast(self, number: int) -> dict[str, Any]:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self._forward(number)
            loss = self._loss(outputs)
        loss.backward()
        return {"loss": loss, "output": outputs[0]}

    def _compile(self, number: int) -> dict[str, Any]:
        try:
            return self._train(number, torch.compile(self.model, backend="aot_eager"))
        finally:
            torch._dynamo.reset()

    def _penalty(self, number: int) -> dict[str, Any]:
        loss = self._loss(self._forward(number))
        parameters = [p for p in self.named_parameters().values() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        penalty = torch.stack([g.square().sum() for g in gradients if g is not None]).sum()
        (loss + 0.01 * penalty).backward()
        return {"loss": loss, "penalty": penalty}

    def _backward_twice(self, number: int) -> dict[str, Any]:
        loss = self._loss(self._forward(number))
        loss.backward(retain_graph=True)
        loss.backward()
        return {"loss": loss}

    def _deepcopy(self, number: int) -> None:
        self._continue_with(copy.deepcopy(self.model if self.stages is None else self.stages))

    def _pickle(self, number: int) -> None:
        self._continue_with(pickle.loads(pickle.dumps(self.model if self.stages is None else self.stages)))

    def _continue_with(self, copied: Any) -> None:
        self.is_copy = True
        self.close()
        if isinstance(copied, list):
            self.stages = copied
        else:
            self.model = copied
        self.make_optimizer()

    def _remove(self, number: int) -> dict[str, Any] | None:
        if number % 2:
            self.close()
            return None
        loss = self._loss(self._forward(number))
        self.close()
        loss.backward()
        return {"loss": loss}

    def _apply_again(self, number: int) -> None:
        if not self.handles and self.stages is None and not self.is_copy:
            self.apply()

    def _report(self, number: int) -> None:
        for handle in self.handles:
            if hasattr(handle, "report") and self.stages is None:
                args, kwargs = self._batch(number)
                if not handle.report(*args, **kwargs):
                    raise AssertionError("report returned nothing")

    def _raise_in_forward(self, number: int) -> dict[str, Any]:
        self._break_in(number, "forward")
        return self._train(number)

    def _raise_in_backward(self, number: int) -> dict[str, Any]:
        self._break_in(number, "backward")
        return self._train(number)

    def _read(self, number: int) -> dict[str, Any]:
        return self.read()

    def _load(self, number: int) -> None:
        states = [{k: v * 0.875 for k, v in part.state_dict().items()} for part in self.parts]
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)

    def _freeze(self, number: int) -> None:
        for part in self.parts:
            for block in core(part).listed[number % 2 :][:1]:
                block.requires_grad_(False)
                block.norm.eval()

    def _capture(self, number: int) -> dict[str, Any]:
        """Collect the outputs of blocks by hooks of the user, and read them in the loss."""
        seen: list[Tensor] = []

        def collect(module: nn.Module, args: Any, output: Any) -> None:
            seen.extend(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

        owners = self.parts if self.is_copy else [self.model]  # copied stages share nothing with the model
        hooks = [block.norm.register_forward_hook(collect) for part in owners for block in core(part).listed]
        try:
            loss = self._loss(self._forward(number)) + sum(output.mean() for output in seen)
        finally:
            for hook in hooks:
                hook.remove()
        with contextlib.suppress(Broken):
            loss.backward()
        return {"loss": loss, "number": len(seen)}
