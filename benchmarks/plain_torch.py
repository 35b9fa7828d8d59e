"""A GPT without mHC in plain PyTorch that imports nothing from this project.

Its step time is the baseline of the PyTorch backend. Its architecture equals that of the backend: pre-norm, rotary
positions, causal softmax attention, SwiGLU, tied head and fused AdamW.
"""

import torch
import torch.nn.functional as F
from torch import nn


class PlainGPT(nn.Module):
    """A GPT without hyper-connections."""

    def __init__(self, width: int, layers: int, heads: int, inner: int, length: int, attention: str) -> None:
        super().__init__()
        self.width = width
        self.heads = heads
        self.attention = attention
        self.embedding = nn.Parameter(0.02 * torch.randn(256, width))
        self.layers = nn.ParameterList()
        for _ in range(layers):
            self.layers.extend(
                [
                    torch.ones(width),
                    0.02 * torch.randn(3 * width, width),
                    0.01 * torch.randn(width, width),
                    torch.ones(width),
                    0.02 * torch.randn(2 * inner, width),
                    0.01 * torch.randn(width, inner),
                ]
            )
        self.norm = nn.Parameter(torch.ones(width))
        half = width // heads // 2
        angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos()[:, None])
        self.register_buffer("sin", angle.sin()[:, None])
        self.register_buffer("bias", torch.full((length, length), -torch.inf).triu(1))

    def rotate(self, x):
        """Apply rotary positions to x [B, T, H, D]."""
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def forward(self, tokens, targets):
        """Return the mean loss."""
        batch, length = tokens.shape
        x = F.embedding(tokens, self.embedding)
        parameters = iter(self.layers)
        for norm1, qkv_weight, out_weight, norm2, up, down in zip(*[parameters] * 6, strict=True):
            qkv = F.linear(F.rms_norm(x, (self.width,), norm1, 1e-5), qkv_weight)
            q, k, v = qkv.view(batch, length, 3 * self.heads, -1).split(self.heads, 2)
            q = self.rotate(q).transpose(1, 2)
            k = self.rotate(k).transpose(1, 2)
            v = v.transpose(1, 2)
            if self.attention == "fused":
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                y = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + self.bias).softmax(-1) @ v
            x = x + F.linear(y.transpose(1, 2).flatten(2), out_weight)
            gate, value = F.linear(F.rms_norm(x, (self.width,), norm2, 1e-5), up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * value, down)
        logits = F.linear(F.rms_norm(x, (self.width,), self.norm, 1e-5), self.embedding)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainTrainer:
    """Training steps of the plain network on the same corpus."""

    def __init__(self, config, train, corpus, attention: str) -> None:
        self.corpus = corpus
        self.shape = (train.global_batch_size, config.seq_length)
        self.clip = train.clip_grad
        inner = config.layer(0).ffn_hidden_size
        size = (config.hidden_size, config.num_layers, config.num_attention_heads, inner, config.seq_length)
        self.model = PlainGPT(*size, attention)
        betas = (train.adam_beta1, train.adam_beta2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=train.lr, betas=betas, fused=True)

    def train_step(self, step: int) -> float:
        """Run a training step and return its loss."""
        batch = self.corpus.batch(step, *self.shape)
        tokens, targets = (torch.from_numpy(x).long() for x in (batch.tokens, batch.targets))
        loss = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()
