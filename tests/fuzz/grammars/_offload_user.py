"""The actions of a user on a model, with and without an offload manager."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from reference_torch.offload import TensorOffloadManager
from tests.fuzz.grammars._offload_model import Broken, Interruption, Model, Program
from tests.fuzz.harness import Wrong

BATCH = 3
ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.detach().view(-1),
    "slice": lambda p: p.detach()[:1],
    "numpy": lambda p: p.detach().numpy(),
}


def alias_of(number: int) -> str:
    """Return the kind of alias that an action takes."""
    return [*ALIASES][number % len(ALIASES)]


class Run:
    """One of the two models, and the references that a user holds."""

    def __init__(self, program: Program, offload: bool) -> None:
        self.program = program
        self.model = Model(program)
        self.early = [p.detach() for p in self.model.parameters()][:3] if program.early_alias else []
        self.aliases: list[Any] = []
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.saved: dict[str, Tensor] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.manager: TensorOffloadManager | None = None
        self.offloads = offload
        self.seen = 0
        self._register()
        self._make_optimizer()

    def act(self, name: str, number: int) -> dict[str, Any] | Exception:
        """Execute an action and return its result or its exception."""
        torch.manual_seed(number)
        try:
            found = getattr(self, "_" + name.replace(" ", "_").replace(".", "_"))(number)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            if name not in ("raise in forward", "raise in backward") or not isinstance(error, Broken):
                return error
            found = {}
        finally:
            for layer in self.model.layers:
                layer.breaks = ""
        return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in (found or {}).items()}

    def end(self) -> dict[str, Any]:
        """Return everything that is visible to the user."""
        gradients = {f"gradient of {k}": p.grad for k, p in self.model.named_parameters() if p.grad is not None}
        stored = {f"kept {n} {k}": g.clone() for n, each in enumerate(self.gradients) for k, g in each.items()}
        aliases = {f"alias {k}": torch.as_tensor(a).clone() for k, a in enumerate([*self.early, *self.aliases])}
        state = {k: v.clone() for k, v in self.model.state_dict().items()}
        if self.manager is not None:
            stats = self.manager.stats
            simple = self.program.order not in ("twice", "parallel") and self.program.tie != "whole layer"
            self._note_bytes(stats, simple)
            self.manager.close()
        parameters = {f"now {k}": p.detach().clone() for k, p in self.model.named_parameters()}
        buffers = {f"now {k}": b.clone() for k, b in self.model.named_buffers()}
        return gradients | stored | aliases | state | parameters | buffers

    def close(self) -> None:
        """Drop all references, and close the manager in half of the programs."""
        manager = self.manager
        self.manager = None
        if manager is not None and self.seen % 2:
            manager.close()
        self.losses.clear()
        self.aliases.clear()

    def _note_bytes(self, stats: dict[str, Any], simple: bool) -> None:
        if stats["copies_in"] < 0 or stats["bytes_in"] < 0 or (simple and stats["peak_bytes"] < 0):
            raise Wrong(f"impossible statistics: {stats}")

    # Actions.

    def _register(self) -> None:
        if not self.offloads:
            return
        self.manager = TensorOffloadManager(
            num_prefetch_layers=self.program.num_prefetch_layers,
            activations=self.program.activations,
            activation_min_bytes=1,
            gradients=self.program.gradients,
            optimizer_state=self.program.gradients,
        )
        for number, layer in enumerate(dict.fromkeys(self.model.layers)):
            self.manager.register_layer(number, layer)
        self.manager.offload_all_layers()

    def _make_optimizer(self) -> None:
        kind = self.program.optimizer
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if kind == "in backward":
            for parameter in parameters:
                own = torch.optim.SGD([parameter], lr=0.05, momentum=0.9)
                parameter.register_post_accumulate_grad_hook(lambda _, own=own: (own.step(), None)[-1])
        elif kind == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        else:
            option = kind.removeprefix("adamw").strip()
            self.optimizer = torch.optim.AdamW(parameters, lr=0.01, **({option: True} if option else {}))

    def _batch(self, number: int) -> Tensor:
        return torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(number))

    def _loss(self, number: int) -> Tensor:
        return self.model(self._batch(number)).square().mean()

    def _step(self, by_manager: bool) -> None:
        if self.program.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if self.optimizer is None:
            return
        if self.manager is not None and by_manager:
            self.manager.step(self.optimizer)
        else:
            self.optimizer.step()

    def _train(self, number: int) -> dict[str, Any]:
        self.seen += 1
        self.model.zero_grad()
        loss = self._loss(number)
        loss.backward()
        self._step(number % 3 > 0)
        return {"loss": loss}

    def _forward(self, number: int) -> dict[str, Any]:
        self.losses.append(self._loss(number))
        return {"loss": self.losses[-1]}

    def _backward(self, number: int) -> dict[str, Any]:
        if self.losses:
            loss = self.losses.pop(number % len(self.losses))
            loss.backward()
        return {f"gradient of {k}": p.grad for k, p in self.model.named_parameters() if p.grad is not None}

    def _no_grad(self, number: int) -> dict[str, Any]:
        with torch.no_grad():
            return {"loss": self._loss(number)}

    def _inference(self, number: int) -> dict[str, Any]:
        with torch.inference_mode():
            return {"loss": self._loss(number).clone()}

    def _eval(self, number: int) -> dict[str, Any]:
        self.model.eval()
        try:
            with torch.no_grad():
                return {"loss": self._loss(number)}
        finally:
            self.model.train()

    def _optimizer_step(self, number: int) -> None:
        self._step(number % 2 > 0)

    def _raise_in_forward(self, number: int) -> dict[str, Any]:
        self.model.layers[number % len(self.model.layers)].breaks = "forward"
        return {"loss": self._loss(number)}

    def _interrupt(self, number: int) -> None:
        """Interrupt a forward, inside of the hooks of others in half of the programs."""
        self.model.layers[number % len(self.model.layers)].breaks = "interruption"
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
        with contextlib.suppress(Interruption), hooks if number % 2 else contextlib.nullcontext():
            self._loss(number)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise Wrong("an interrupted forward left saved-tensor hooks")

    def _train_only_norms(self, number: int) -> dict[str, Any]:
        """Train with norms in training and everything else evaluated."""
        for part in self.model.modules():
            part.train(isinstance(part, nn.BatchNorm1d))
        try:
            return self._train(number)
        finally:
            self.model.train()

    def _hook(self, number: int) -> None:
        """Let hooks of backward write parameters past their version counters."""
        layer = self.model.layers[number % len(self.model.layers)]
        part = [*layer.modules()][number % 2 - 1]

        def shrink(*_: object) -> None:
            for parameter in layer.parameters():
                parameter.data.mul_(0.75)

        if number % 3:
            part.register_full_backward_hook(shrink)
        else:
            next(p for p in self.model.layers.parameters() if p.requires_grad).register_hook(shrink)

    def _raise_in_backward(self, number: int) -> None:
        self.model.layers[number % len(self.model.layers)].breaks = "backward"
        self._loss(number).backward()

    def _parameter(self, number: int) -> nn.Parameter:
        parameters = [*self.model.layers.parameters()]
        return parameters[number % len(parameters)]

    def _alias(self, number: int) -> None:
        parameter = self._parameter(number)
        make = "detach" if parameter.is_complex() and alias_of(number) == "numpy" else alias_of(number)
        self.aliases.append(ALIASES[make](parameter))

    def _write_alias(self, number: int) -> None:
        with torch.no_grad():
            for alias in [*self.aliases, *self.early][: 1 + number % 3]:
                alias *= 0.5

    def _drop_aliases(self, number: int) -> None:
        self.aliases.clear()

    def _write_parameter(self, number: int) -> None:
        parameter = self._parameter(number)
        if number % 3 == 0:
            parameter.data.mul_(0.5)
        else:
            with torch.no_grad():
                parameter.copy_(parameter * 0.5) if number % 3 == 1 else parameter.add_(0.125)

    def _keep_gradients(self, number: int) -> None:
        """Keep the gradients, or put back those of another time."""
        named = dict(self.model.named_parameters())
        self.gradients.append({k: p.grad for k, p in named.items() if p.grad is not None})
        if number % 3 == 0:
            for key, gradient in self.gradients[number % len(self.gradients)].items():
                if gradient.device == named[key].device:
                    named[key].grad = gradient
        elif number % 3 == 1:
            self.model.zero_grad()

    def _write_gradients(self, number: int) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None and number % 3 == 0:
                parameter.grad.data.mul_(0.5)
            elif parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5 if number % 3 == 1 else parameter.grad.mul_(0.5)

    def _read_parameters(self, number: int) -> dict[str, Any]:
        if number % 2:
            return {k: p.norm() for k, p in self.model.named_parameters()}
        return {"vector": nn.utils.parameters_to_vector(p for p in self.model.parameters() if not p.is_complex())}

    def _penalty(self, number: int) -> dict[str, Any]:
        penalty = sum((p.abs() ** 2).sum() for p in self.model.parameters())
        if number % 2:
            self.losses.append(penalty)
            return {"penalty": penalty}
        loss = penalty + self._loss(number)
        loss.backward()
        return {"loss": loss}

    def _torch_save(self, number: int) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(self.model.state_dict(), file)
        file.seek(0)
        self.saved = torch.load(file)
        return dict(self.saved)

    def _save_module(self, number: int) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False) if number % 2 else pickle.loads(pickle.dumps(self.model))
        return self._used(copied, number)

    def _state_dict(self, number: int) -> dict[str, Any]:
        self.saved = copy.deepcopy(self.model.state_dict())
        return dict(self.saved)

    def _safetensors(self, number: int) -> dict[str, Any]:
        from safetensors.torch import load, save

        state = {k: v.contiguous() for k, v in self.model.state_dict().items() if "weight" not in k}
        return load(save(state))

    def _load(self, number: int) -> dict[str, Any]:
        if self.saved:
            self.model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in self.saved.items()})
        return dict(self.model.state_dict())

    def _deepcopy(self, number: int) -> dict[str, Any]:
        return self._used(copy.deepcopy(self.model), number)

    def _used(self, copied: nn.Module, number: int) -> dict[str, Any]:
        """Train a copy, which must be independent of the original."""
        hooks = sum(len(v) for part in copied.modules() for k, v in vars(part).items() if k.endswith("_hooks"))
        torch.manual_seed(number)
        loss = copied(self._batch(number)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        return {"loss": loss, "hooks": hooks}

    def _freeze(self, number: int) -> None:
        layer = self.model.layers[number % len(self.model.layers)]
        layer.requires_grad_(not layer.weight.requires_grad)

    def _move(self, number: int) -> None:
        """Move a layer, which must have no visible effect."""
        if self.manager is None:
            return
        layers = [*self.manager.layer_params]
        if number % 3 == 0:
            self.manager.offload_all_layers()
        elif number % 3 == 1:
            self.manager.require(layers[number % len(layers)])
        else:
            self.manager.offload_layer(layers[number % len(layers)])

    def _close(self, number: int) -> None:
        if self.manager is not None:
            self.manager.close()
            self.manager = None

    def _drop(self, number: int) -> None:
        self.manager = None

    def _register_again(self, number: int) -> None:
        if self.offloads:
            self.manager = None
            self._register()

    def _grad_of_input(self, number: int) -> dict[str, Any]:
        x = self._batch(number).requires_grad_()
        (gradient,) = torch.autograd.grad(self.model(x).square().mean(), x)
        return {"gradient": gradient}

    def _double_backward(self, number: int) -> dict[str, Any]:
        x = self._batch(number).requires_grad_()
        (gradient,) = torch.autograd.grad(self.model(x).square().mean(), x, create_graph=True)
        gradient.square().sum().backward()
        return {"gradient": gradient}

    def _functional_call(self, number: int) -> dict[str, Any]:
        values = {k: p * 0.5 for k, p in self.model.named_parameters()}
        loss = torch.func.functional_call(self.model, values, (self._batch(number),)).square().mean()
        loss.backward()
        return {"loss": loss}
