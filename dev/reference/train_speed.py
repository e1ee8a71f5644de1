"""Training steps of the reference model as fast as PyTorch makes them, for dev/bench/train_step.cpp to time.

    train_speed.py eager|compile LAYERS CHANNELS HEADS VOCAB B T THREADS

Reads a number of steps from each line of its input, and answers with the seconds that they took. The model is
gpt2.py's, but for attention, which is PyTorch's own fused one; AdamW is the fused one too.
"""

import sys
import time

import torch
from torch.nn import functional as F

import gpt2


def fused_attention(self, x):
    B, T, C = x.shape
    q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
               for part in self.c_attn(x).split(C, dim=2))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.c_proj(out.transpose(1, 2).reshape(B, T, C))


def main():
    mode, sizes = sys.argv[1], [int(word) for word in sys.argv[2:]]
    layers, channels, heads, vocab, B, T, threads = sizes
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    gpt2.Attention.forward = fused_attention
    model = gpt2.GPT(gpt2.Config(layers, heads, channels, T, vocab, tied_head=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=True)
    tokens = torch.randint(vocab, (B, T + 1))

    def loss_of(inputs, targets):
        return gpt2.mean_loss(model(inputs), targets)

    if mode == "compile":
        loss_of = torch.compile(loss_of)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_of(tokens[:, :-1], tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
