"""JAX computes gradients of a loss of whole logits on two forced devices, and writes them to the file named."""

import pickle
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jax_impl.tensor_parallel import TensorParallel
from tests.tensor_parallel.jobs import logit_inputs


def main(path: Path) -> None:
    """Write the gradients of hidden states, of each device, and of the weight, with whole and divided tokens."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    hidden, weight, weights = logit_inputs()
    results = []
    for tokens in (False, True):
        ranks = TensorParallel("tp", 2, tokens)

        def loss(hidden, weight, ranks=ranks):
            return (ranks.gather_logits(ranks.enter(hidden) @ weight.T) * weights).sum()

        divided = PartitionSpec(None, "tp") if tokens else PartitionSpec()
        specs = {"in_specs": (divided, PartitionSpec("tp")), "out_specs": PartitionSpec("tp"), "check_vma": False}

        @partial(jax.shard_map, mesh=mesh, **specs)
        def gradients(hidden, weight, loss=loss):
            of_hidden, of_weight = jax.grad(loss, argnums=(0, 1))(hidden, weight)
            return of_hidden[None], of_weight

        results.append(jax.tree.map(np.asarray, gradients(hidden, weight)))
    path.write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
