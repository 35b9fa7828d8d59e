"""PyTorch's trainer on several processes of this machine, with the methods that a comparison needs."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.data import Batch, Corpus
from diptych.plans.offload import total_statistics
from diptych.plans.training import StepResult
from reference_torch.groups import make_mesh
from reference_torch.rank_pool import RankPool, preload
from reference_torch.train import Trainer


class RankTrainer:
    """A trainer on each of ``replicas * model_parallel_size`` gloo ranks, with the methods of Trainer.

    Args:
        config: configuration of the model.
        train_config: configuration of the optimisation.
        corpus: training and validation data.
        replicas: number of replicas.

    Raises:
        RankError: a rank failed; the message has the output of all ranks.
    """

    def __init__(self, config: TransformerConfig, train_config: TrainConfig, corpus: Corpus, replicas: int = 1) -> None:
        self.config = config
        preload("parity.ranks")
        timeout = config.pipeline_timeout + 60.0  # ranks report late messages before this time-out
        self._pool = RankPool(replicas * config.model_parallel_size, timeout)
        self._pool.hold("parity.ranks:make_trainer", config, train_config, corpus)

    def __enter__(self) -> "RankTrainer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.close()

    def train_step(self, step: int) -> StepResult:
        """Run one optimizer step on all ranks; see Trainer.train_step."""
        return self._call("train_step", step)

    def loss_and_gradients(self, batch: Batch, step: int = 0) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss and all gradients of a batch; see Trainer.loss_and_gradients."""
        return self._call("loss_and_gradients", batch, step)

    @property
    def offload_statistics(self) -> dict[str, Any] | None:
        """Offload statistics of all ranks, combined by total_statistics; None without offload."""
        ranks = self._pool.call("__getattribute__", "offload_statistics")
        return None if ranks[0] is None else total_statistics(ranks)

    def validation_loss(self) -> float:
        """Return the mean loss of the validation split; see Trainer.validation_loss."""
        return self._call("validation_loss")

    def parameters(self) -> dict[str, np.ndarray]:
        """Return all parameters by canonical name; see Trainer.parameters."""
        return self._call("parameters")

    def set_parameters(self, values: Mapping[str, np.ndarray]) -> None:
        """Set all parameters by canonical name; see Trainer.set_parameters."""
        self._call("set_parameters", values)

    def save(self, folder: Path, keep: int = 2) -> Path:
        """Write a checkpoint and return its path; see Trainer.save."""
        return self._call("save", folder, keep)

    def resume(self, path: Path) -> int:
        """Resume from a checkpoint and return its step; see Trainer.resume."""
        return self._call("resume", path)

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._pool.call(method, *arguments)[0]  # every rank returns the whole result


def make_trainer(config: TransformerConfig, train_config: TrainConfig, corpus: Corpus) -> Trainer:
    """Return the trainer of this rank; RankTrainer calls this function on every rank of its pool."""
    return Trainer(config, train_config, corpus, device="cpu", mesh=make_mesh(config))


def torch_trainer(
    config: TransformerConfig, train_config: TrainConfig, corpus: Corpus, replicas: int = 1
) -> AbstractContextManager[Trainer | RankTrainer]:
    """Return PyTorch's trainer: in this process, or in one process per rank if there are several.

    Args:
        config: configuration of the model.
        train_config: configuration of the optimisation.
        corpus: training and validation data.
        replicas: number of replicas.
    """
    if replicas * config.model_parallel_size > 1:
        return RankTrainer(config, train_config, corpus, replicas)
    return nullcontext(Trainer(config, train_config, corpus))
