"""The distributed optimizer in PyTorch: AdamW whose state the ranks with the same parameters divide among them.

diptych/plans/optimizer_shards.py defines the shards and the parameters with master weights. Ranks exchange one buffer
for the parameters of a stage, in which the shards of a rank are side by side: [ranks, elements of the shards]. JAX's
counterpart is ``jax_impl/distributed_optimizer.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.optim.adamw import adamw

from diptych.plans.optimizer_shards import own_shard, shard_size
from reference_torch.autograd import gradient_dtype
from reference_torch.groups import gather_rows
from reference_torch.history_adamw import advance


def rows_by_rank(tensor: Tensor, ranks: int) -> Tensor:
    """Return the shards of a tensor as one row per rank, [ranks, shard size], padded with zeros."""
    flat = tensor.flatten()
    return functional.pad(flat, (0, ranks * shard_size(len(flat), ranks) - len(flat))).view(ranks, -1)


def join_by_rank(tensors: Sequence[Tensor], ranks: int) -> Tensor:
    """Return the rows of several tensors of one dtype, side by side.

    Args:
        tensors: gradients or parameters; at least one.
        ranks: ranks that divide them.

    Returns:
        [ranks, sum of the shard sizes]
    """
    return torch.cat([rows_by_rank(tensor, ranks) for tensor in tensors], dim=1)


def copy_from_rows(joined: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with the elements that join_by_rank returned.

    Args:
        joined: [ranks, sum of the shard sizes]
        tensors: as in join_by_rank.
    """
    ranks = len(joined)
    sizes = [shard_size(tensor.numel(), ranks) for tensor in tensors]
    for tensor, rows in zip(tensors, joined.split(sizes, dim=1), strict=True):
        tensor.copy_(rows.flatten()[: tensor.numel()].view_as(tensor))


def norms_of_shards(tensors: Sequence[Tensor], ranks: int, only: int | None = None) -> Tensor:
    """Return the 2-norm of every rank's shards of tensors, in the order of the ranks.

    Training adds up the squares of these norms in the same order with and without a distributed optimizer, so that
    clipping does not differ by rounding.

    Args:
        tensors: gradients, which may be on several devices.
        ranks: ranks that divide them.
        only: the rank whose norm is returned; None: all of them.

    Returns:
        [ranks] or [1]
    """
    if ranks == 1 or not tensors:
        return torch.nn.utils.get_total_norm(tensors).expand(1 if only is not None else ranks)
    chosen = slice(None) if only is None else slice(only, only + 1)
    norms = [torch.linalg.vector_norm(rows_by_rank(x, ranks)[chosen], dim=1) for x in tensors]
    by_rank = torch.stack([each.to(norms[0].device) for each in norms], dim=1)  # [ranks, tensors]
    return torch.linalg.vector_norm(by_rank, dim=1)


class DistributedAdamW(torch.optim.Optimizer):
    """AdamW whose ranks each store the state of their shard and update it; results equal those of AdamW.

    Gradients are unsharded tensors, of which only the rank's shard is read. With ``keep_master_weights``, parameters
    are rounded copies of master weights, of which a rank has its shard. A weight that is overwritten without
    set_master_weight is reset to its master weight at the next step.

    Args:
        params: contiguous parameters, as in torch.optim.AdamW.
        group: the ranks with the same parameters. All call ``step`` with gradients of the same parameters in the same
            order. None: this process alone.
        timeout: seconds to wait for the other ranks.
        lr: learning rate.
        betas: decay rates of both moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.

    Raises:
        ValueError: a setting is outside its range, or a group of parameters has one that is not supported.
    """

    def __init__(
        self,
        params: Any,
        group: ProcessGroup | None,
        timeout: float,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._group = group
        self._timeout = timeout
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in torch.optim.Optimizer.

        Args:
            param_group: params, and settings that differ from those of the optimizer.

        Raises:
            ValueError: as in the constructor.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        unknown = group.keys() - {"params", "param_names", "history_len", *self.defaults}
        if unknown:
            raise ValueError(f"param_groups: expected {', '.join(self.defaults)}, got {', '.join(sorted(unknown))}")
        settings = {name: group[name] for name in self.defaults}
        torch.optim.AdamW([torch.zeros(())], **settings)  # checks their ranges
        for parameter in group["params"]:
            if not parameter.is_contiguous():
                raise ValueError(
                    f"params: expected contiguous parameters, of which ranks have shards, got one of shape "
                    f"{[*parameter.shape]} and strides {parameter.stride()}; store it as parameter.contiguous()"
                )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "DistributedAdamW: expected to stay on its rank, got copy.deepcopy or pickle; save its state_dict(), and "
            "make a new optimizer for the copied parameters"
        )

    @property
    def ranks(self) -> int:
        """Number of ranks that divide the state."""
        return 1 if self._group is None else self._group.size()

    @property
    def _rank(self) -> int:
        """Number of this rank among them."""
        return 0 if self._group is None else dist.get_rank(self._group)

    def own_shard(self, x: Tensor) -> Tensor:
        """Return the flat shard of this rank, a view of a contiguous tensor."""
        return x.view(-1)[own_shard(x.numel(), self.ranks, self._rank)]

    @torch.no_grad()
    def keep_master_weights(self, dtype: torch.dtype, parameters: Iterable[Tensor]) -> None:
        """Round parameters to a narrower type, and keep this rank's shard of their values as master weights.

        Updates change the master weights and round again. Gradients stay in the type that the parameters had, in which
        microbatches are summed.

        Copies of the parameters, such as copy.deepcopy of the model, sum their gradients in the narrow type.

        Args:
            dtype: new type of the parameters.
            parameters: parameters of this optimizer without gradients, before their first update.

        Raises:
            ValueError: a parameter has state or a gradient already, or is not one of the optimizer's.
        """
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for parameter in {id(parameter): parameter for parameter in parameters}.values():
            if id(parameter) not in own or self.state.get(parameter) or parameter.grad is not None:
                raise ValueError(
                    "keep_master_weights: expected parameters of this optimizer before their first gradient and "
                    f"update, got one of shape {[*parameter.shape]} that is not; call keep_master_weights once, right "
                    "after making the optimizer"
                )
            wide = parameter.dtype
            self.state[parameter]["master_weight"] = self.own_shard(parameter.detach()).clone()
            parameter.data = parameter.data.to(dtype)
            parameter.grad_dtype = wide

    def master_weight(self, parameter: Tensor) -> Tensor | None:
        """Return this rank's shard of the master weights of a parameter, flat; None if it has none."""
        return self.state[parameter].get("master_weight") if parameter in self.state else None

    def set_master_weight(self, parameter: Tensor, value: Tensor) -> None:
        """Overwrite this rank's shard of the master weights of a parameter that has some; ``value`` is unsharded."""
        master = self.master_weight(parameter)
        if master is not None:
            master.copy_(self.own_shard(value.to(master.dtype).contiguous()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this rank that state_dict returned, in its types.

        PyTorch's method would round master weights and moments to the type of the parameters.

        Args:
            state_dict: of this rank's optimizer, of as many ranks and the same parameters, after the same call of
                keep_master_weights.

        Raises:
            ValueError: the state is that of another rank or number of ranks, or of other master weights.
        """
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name != "step":
                    self.state[parameter][name] = value.detach().to(parameter.device, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, and whose it is."""
        return super().state_dict() | {"rank": self._rank, "ranks": self.ranks}

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state has the shards of this rank; see load_state_dict."""
        expected = {"rank": self._rank, "ranks": self.ranks}
        actual = {name: state_dict.get(name) for name in expected}
        if actual != expected:
            raise ValueError(
                f"state_dict: expected the state of {expected}, whose shards this rank has, got {actual}; save and "
                "load it on every rank, or use checkpoints of the Trainer, which are unsharded"
            )
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=False):
            has_master = "master_weight" in state_dict["state"].get(number, {})
            if has_master != (self.master_weight(parameter) is not None):
                raise ValueError(
                    f"state_dict: expected {'no ' * has_master}master weights of parameter {number}, as this optimizer "
                    f"has, got {'some' if has_master else 'none'}; call keep_master_weights before save and before load"
                )

    def unshard(self, shard: Tensor | None, parameter: Tensor) -> Tensor:
        """Return the shards of all ranks as a tensor of the shape of their parameter; every rank calls this.

        Args:
            shard: shard of this rank, which may be on the host; None: zeros, in the type of gradients.
            parameter: gives shape and device.
        """
        dtype = gradient_dtype(parameter) if shard is None else shard.dtype
        own = torch.zeros(shard_size(parameter.numel(), self.ranks), dtype=dtype, device=parameter.device)
        if shard is not None:
            own[: len(shard)] = shard
        if self._group is None:
            return own.view(parameter.shape)
        rows = gather_rows(own, self._group, "the optimizer's state of other ranks", self._timeout)
        return rows.flatten()[: parameter.numel()].view(parameter.shape)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update this rank's shards, and receive those of the other ranks.

        Args:
            closure: None; it is there because all optimizers have it.

        Raises:
            PipelineError: a rank did not take part in time.
            ValueError: a gradient is sparse.
        """
        assert closure is None, "a closure would be called on shards"
        changed = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise ValueError("step: expected dense gradients, got a sparse one; use Embedding(sparse=False)")
            changed += parameters
            shards = [(p, self._updated(p), self.own_shard(p.grad.contiguous())) for p in parameters]
            if "history_len" in group:
                advance([shard for _, shard, _ in shards], [g for *_, g in shards], group["history_len"])
            else:
                self._update(group, [each for each in shards if len(each[1])])
            for parameter, shard, _ in shards:
                if self.master_weight(parameter) is not None:
                    self.own_shard(parameter.detach()).copy_(shard)
        for dtype in dict.fromkeys(p.dtype for p in changed):
            self._all_gather_parameters([p for p in changed if p.dtype == dtype])

    def _updated(self, parameter: Tensor) -> Tensor:
        """Return what an update changes: this rank's shard of a parameter, or of its master weights."""
        master = self.master_weight(parameter)
        return self.own_shard(parameter.detach()) if master is None else master

    def _update(self, group: dict[str, Any], shards: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Update shards in place, given as (parameter, its shard, the shard of its gradient)."""
        for parameter, shard, _ in shards:
            if "exp_avg" not in self.state[parameter]:
                self.state[parameter] |= {
                    "step": torch.zeros((), device=shard.device),
                    "exp_avg": torch.zeros_like(shard),
                    "exp_avg_sq": torch.zeros_like(shard),
                }
        states = [self.state[parameter] for parameter, *_ in shards]
        adamw(
            [shard for _, shard, _ in shards],
            [gradient.to(shard.dtype) for _, shard, gradient in shards],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _all_gather_parameters(self, parameters: list[Tensor]) -> None:
        """Overwrite the shards of other ranks with the elements that these ranks have updated."""
        if self._group is None:
            return
        sizes = [shard_size(p.numel(), self.ranks) for p in parameters]
        own = parameters[0].new_zeros(sum(sizes))
        for parameter, part in zip(parameters, own.split(sizes), strict=True):
            shard = self.own_shard(parameter.detach())
            part[: len(shard)] = shard
        rows = gather_rows(own, self._group, "the parameters that other ranks have updated", self._timeout)
        copy_from_rows(rows, [parameter.detach() for parameter in parameters])
