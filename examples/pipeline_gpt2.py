"""GPT-2 of transformers in four stages, on two pipeline ranks times two data-parallel ranks (FSDP): four processes.

python examples/pipeline_gpt2.py          (needs transformers; with several machines, start main by torchrun)
"""

import torch
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reference_torch.pipeline import PipelineExecutor, split_batch, split_model
from reference_torch.rank_pool import RankPool


def loss_fn(output, labels):
    """Return the mean loss of a microbatch."""
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def main() -> list[float]:
    """Train on one batch, and return the loss of each step on ranks with the last stage, or [] on other ranks."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, use_cache=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stages = split_model(transformers.GPT2LMHeadModel(config), [f"transformer.h.{i}" for i in (1, 2, 3)])
    own = [fully_shard(stage, mesh=mesh["dp"]) for stage in stages[mesh.get_local_rank("pp") :: 2]]
    stages[mesh.get_local_rank("pp") :: 2] = own
    pipeline = PipelineExecutor(stages, "interleaved", 4, loss_fn, group=mesh.get_group("pp"))
    optimizer = torch.optim.AdamW([p for stage in own for p in stage.parameters()], lr=1e-2)
    tokens = torch.randint(0, 64, (16, 17)).chunk(2)[mesh.get_local_rank("dp")]
    batch, labels = split_batch({"input_ids": tokens[:, :-1]}, 4), split_batch(tokens[:, 1:], 4)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(pipeline.step(batch, labels))
        optimizer.step()
    return [float(torch.stack(step).mean()) for step in losses if step]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    with RankPool(4) as pool:
        losses = pool.run("pipeline_gpt2:main")[1]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps on four processes")
    assert losses[-1] < losses[0] - 0.5
