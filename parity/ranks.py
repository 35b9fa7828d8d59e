"""PyTorch's trainer on several processes of this machine, handled as one object: what a comparison needs of it."""

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
from reference_torch.rank_pool import RankPool
from reference_torch.train import Trainer


class RankTrainer:
    """A Trainer on each of ``model_parallel_size`` gloo ranks; methods as the Trainer's.

    Raises:
        RankError: a rank failed; what every one of them said.
    """

    def __init__(self, config: TransformerConfig, train_config: TrainConfig, corpus: Corpus) -> None:
        self.config = config
        timeout = config.pipeline_timeout + 60.0  # a message that is late is the ranks' own to report
        self._pool = RankPool(config.model_parallel_size, timeout, ("reference_torch.train",))
        self._pool.hold("parity.ranks:make_trainer", config, train_config, corpus)

    def __enter__(self) -> "RankTrainer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.close()

    def train_step(self, step: int) -> StepResult:
        """See Trainer."""
        return self._call("train_step", step)

    def loss_and_gradients(self, batch: Batch, step: int = 0) -> tuple[float, dict[str, np.ndarray]]:
        """See Trainer."""
        return self._call("loss_and_gradients", batch, step)

    @property
    def offload_statistics(self) -> dict[str, Any] | None:
        """Of all ranks together; see Trainer and total_statistics."""
        ranks = self._pool.call("__getattribute__", "offload_statistics")
        return None if ranks[0] is None else total_statistics(ranks)

    def validation_loss(self) -> float:
        """See Trainer."""
        return self._call("validation_loss")

    def parameters(self) -> dict[str, np.ndarray]:
        """See Trainer."""
        return self._call("parameters")

    def set_parameters(self, values: Mapping[str, np.ndarray]) -> None:
        """See Trainer."""
        self._call("set_parameters", values)

    def save(self, folder: Path, keep: int = 2) -> Path:
        """See Trainer."""
        return self._call("save", folder, keep)

    def resume(self, path: Path) -> int:
        """See Trainer."""
        return self._call("resume", path)

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._pool.call(method, *arguments)[0]  # every rank knows the whole result


def make_trainer(config: TransformerConfig, train_config: TrainConfig, corpus: Corpus) -> Trainer:
    """This rank's part; run on every rank of the pool."""
    return Trainer(config, train_config, corpus, device="cpu", mesh=make_mesh(config))


def torch_trainer(
    config: TransformerConfig, train_config: TrainConfig, corpus: Corpus
) -> AbstractContextManager[Trainer | RankTrainer]:
    """PyTorch's trainer: here, or where ranks share the model or its sequences, on as many processes."""
    if config.model_parallel_size > 1:
        return RankTrainer(config, train_config, corpus)
    return nullcontext(Trainer(config, train_config, corpus))
