"""GPT-2 of transformers in four stages, on two pipeline ranks times two data-parallel ranks (FSDP): four processes."""

import torch
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from reference_torch.pipeline import PipelineExecutor, split_batch, split_model
from reference_torch.rank_pool import RankPool


def main() -> list[torch.Tensor]:
    """Train on one batch, and return the last losses (start this by torchrun if there are several machines)."""
    torch.manual_seed(0)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, use_cache=False))
    stages, own = split_model(model, [f"transformer.h.{i}" for i in (1, 2, 3)]), slice(mesh.get_local_rank("pp"), 4, 2)
    stages[own] = [fully_shard(stage, mesh=mesh["dp"]) for stage in stages[own]]
    loss_fn = lambda output, labels: torch.nn.functional.cross_entropy(output.logits.mT, labels)  # noqa: E731
    pipeline = PipelineExecutor(stages, "interleaved", 4, loss_fn, group=mesh.get_group("pp"))
    optimizer = torch.optim.AdamW([p for stage in stages[own] for p in stage.parameters()], lr=1e-2)
    tokens = torch.randint(0, 64, (16, 17)).chunk(2)[mesh.get_local_rank("dp")]
    for _ in range(20):
        optimizer.zero_grad()
        losses = pipeline.step(split_batch({"input_ids": tokens[:, :-1]}, 4), split_batch(tokens[:, 1:], 4))
        optimizer.step()
    return losses


if __name__ == "__main__":
    print("losses of the microbatches:", *RankPool(4).run("pipeline_gpt2:main")[1])
