"""GPT-2 (Radford et al. 2019) in plain PyTorch: the model that muGPT's C++ is judged against.

Written for reading and for float64, not for speed: attention is the textbook softmax(q k^T / sqrt(HS)) v
with the whole (T, T) matrix. Tensor names are Hugging Face's without their "transformer." prefix, as in
muGPT's parameter table, and every matrix is (out, in), as muGPT stores it; Hugging Face keeps the matrices
inside the blocks as (in, out). `to_hugging_face` converts.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Config:
    layers: int
    heads: int
    channels: int
    seq_len: int
    vocab_size: int
    tied_head: bool


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.c_attn = nn.Linear(config.channels, 3 * config.channels)  # rows: all of q, all of k, all of v
        self.c_proj = nn.Linear(config.channels, config.channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2)  # (B, NH, T, HS)
                   for part in self.c_attn(x).split(C, dim=2))
        scores = q @ k.transpose(2, 3) / (C // self.heads) ** 0.5
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(future, float("-inf")).softmax(dim=3)
        return self.c_proj((probabilities @ v).transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.channels, 4 * config.channels)
        self.c_proj = nn.Linear(4 * config.channels, config.channels)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.channels, eps=1e-5)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.channels, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.channels)
        self.wpe = nn.Embedding(config.seq_len, config.channels)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.channels, eps=1e-5)
        if not config.tied_head:
            self.lm_head = nn.Linear(config.channels, config.vocab_size, bias=False)

    def forward(self, tokens):
        """Logits (B, T, V) of tokens (B, T)."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        head = self.wte if self.config.tied_head else self.lm_head
        return F.linear(self.ln_f(x), head.weight)


def mean_loss(logits, targets):
    """Mean cross-entropy in nats over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def is_conv1d(name):
    """Hugging Face stores these transposed. Decided by name, since a square matrix does not show it."""
    return name.startswith("h.") and name.endswith(".weight") and ".ln_" not in name


def to_hugging_face(name, tensor):
    """Name and layout of one of our tensors in transformers.GPT2LMHeadModel."""
    prefix = "" if name.startswith("lm_head") else "transformer."
    return prefix + name, tensor.T if is_conv1d(name) else tensor
