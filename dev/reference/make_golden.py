"""Writes golden/tied.safetensors and golden/untied.safetensors, what test_gpt.cu is judged against.

Run from anywhere: python dev/reference/make_golden.py. Everything is computed in float64 from weights that
float32 holds exactly, and stored as F32; the one exception is Newton-Schulz, which runs in the type that a
series' name says. README.md lists the tensors of the files.
"""

import json
import pathlib
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file

from gpt2 import GPT, Config, mean_loss, to_hugging_face

GOLDEN = pathlib.Path(__file__).parent / "golden"

# Sizes that are multiples of nothing: HS = 12, V pads to 256, T is shorter than seq_len.
SIZES = dict(layers=2, heads=3, channels=36, seq_len=24, vocab_size=131)
STEPS, MICRO_BATCHES, B, T = 10, 2, 3, 21
RECIPE = dict(lr=5e-3, warmup=3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0,
              muon_momentum=0.95, muon_ns_steps=5)
# Whose values after the last step are kept: each optimizer group, q/k/v split or not, decayed or not.
FINAL = ["wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.mlp.c_proj.weight", "h.1.attn.c_attn.weight",
         "h.1.mlp.c_fc.bias"]


def make_model(tied_head, seed):
    """Random weights, larger than GPT-2's initial ones, so that attention, GELU and LayerNorm are far from
    linear and no gradient is small; biases and gains are random too, so that none can be forgotten."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(Config(**SIZES, tied_head=tied_head)).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)  # float32: exact in float64
            gain = ".ln_" in name or name.startswith("ln_f")
            p.copy_(0.1 * noise + (1 if gain and name.endswith("weight") else 0))
            p.copy_(p.float())
    return model


def make_text(seed):
    """(steps, micro-batches, B, T + 1) token ids with something to learn: the next token is 5 x + 7 mod V for
    three tokens in four, else any."""
    generator = torch.Generator().manual_seed(seed)
    V = SIZES["vocab_size"]
    shape = (STEPS, MICRO_BATCHES, B, T + 1)
    text = torch.randint(V, shape, generator=generator)
    follows = torch.rand(shape, generator=generator) < 0.75
    for t in range(1, T + 1):
        text[..., t] = torch.where(follows[..., t], (5 * text[..., t - 1] + 7) % V, text[..., t])
    return text


def check_against_transformers(model, tokens, targets):
    """Logits and every gradient agree with those of Hugging Face's own GPT-2 to float64's precision."""
    c = model.config
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=c.layers, n_head=c.heads, n_embd=c.channels, n_positions=c.seq_len, vocab_size=c.vocab_size,
        tie_word_embeddings=c.tied_head, attn_implementation="eager", attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)).double()
    peer_parameters = dict(peer.named_parameters())
    assert len(peer_parameters) == len(list(model.parameters()))
    with torch.no_grad():
        for name, p in model.named_parameters():
            peer_name, value = to_hugging_face(name, p)
            peer_parameters[peer_name].copy_(value)
    logits = peer(tokens).logits
    mean_loss(logits, targets).backward()
    torch.testing.assert_close(logits, model(tokens), rtol=1e-9, atol=1e-9)
    for name, p in model.named_parameters():
        peer_name, grad = to_hugging_face(name, p.grad)
        torch.testing.assert_close(peer_parameters[peer_name].grad, grad, rtol=1e-9, atol=1e-9)


def forward_backward(model, tokens, targets):
    model.zero_grad()
    logits = model(tokens)
    loss = mean_loss(logits, targets)
    loss.backward()
    return logits.detach(), loss.detach()


def newton_schulz_fp32(grad, coefficients, steps, eps):
    """Stands in for torch.optim._muon._zeropower_via_newtonschulz: the same polynomial on the same small
    side, in float32. PyTorch rounds to bfloat16, before it even takes the norm, and stays there. Its eps, a
    floor of the norm, never acts here, where no gradient comes near it."""
    assert grad.norm() > 100 * eps
    a, b, c = coefficients
    x = (grad / grad.norm()).float()
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


def muon_blocks(name, tensor):
    """The matrices that Muon orthogonalises one by one in a tensor of a block: q, k and v apart."""
    return tensor.chunk(3) if name.endswith("attn.c_attn.weight") else [tensor]


def make_optimizers(model, use_muon):
    """PyTorch's optimizers, and a function that hands the gradients of q, k, v and the other matrices to
    Muon's parameters, which are views into the model's tensors."""
    matrices = {name: p for name, p in model.named_parameters()
                if use_muon and p.ndim == 2 and name.startswith("h.")}
    rest = [p for name, p in model.named_parameters() if name not in matrices]
    adamw = torch.optim.AdamW(
        [{"params": [p for p in rest if p.ndim == 2]},
         {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0}],
        lr=RECIPE["lr"], betas=(RECIPE["beta1"], RECIPE["beta2"]), eps=RECIPE["eps"],
        weight_decay=RECIPE["weight_decay"])
    if not use_muon:
        return [adamw], lambda: None

    blocks = {name: [torch.nn.Parameter(view) for view in muon_blocks(name, p.data)]
              for name, p in matrices.items()}
    muon = torch.optim.Muon(
        [block for tensor in blocks.values() for block in tensor],
        lr=RECIPE["lr"], weight_decay=RECIPE["weight_decay"], momentum=RECIPE["muon_momentum"], nesterov=True,
        ns_coefficients=(3.4445, -4.7750, 2.0315), ns_steps=RECIPE["muon_ns_steps"],
        adjust_lr_fn="match_rms_adamw")

    def hand_over_gradients():
        for name, p in matrices.items():
            for block, grad in zip(blocks[name], muon_blocks(name, p.grad)):
                block.grad = grad

    return [adamw, muon], hand_over_gradients


def train(seed, tokens, targets, use_muon):
    """STEPS steps from the initial weights. Each accumulates MICRO_BATCHES micro-batches into the gradient of
    the mean loss, clips it, and updates. The series: the loss before each step on its own batch, the
    gradient's norm before clipping, the loss after each step on the first batch."""
    model = make_model(tied_head=True, seed=seed)
    optimizers, hand_over_gradients = make_optimizers(model, use_muon)
    series = {"train_loss": [], "grad_norm": [], "loss_after": []}
    for step in range(STEPS):
        model.zero_grad()
        losses = []
        for x, y in zip(tokens[step], targets[step]):
            loss = mean_loss(model(x), y)
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE["grad_clip"])
        hand_over_gradients()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RECIPE["lr"] * min(1.0, (step + 1) / RECIPE["warmup"])
            optimizer.step()
        with torch.no_grad():
            after = mean_loss(model(tokens[0].flatten(0, 1)), targets[0].flatten(0, 1))
        series["train_loss"].append(torch.stack(losses).mean())
        series["grad_norm"].append(norm)
        series["loss_after"].append(after)
    series = {name: torch.stack(values) for name, values in series.items()}
    parameters = dict(model.named_parameters())
    return series | {f"final.{name}": parameters[name].detach() for name in FINAL}


def main():
    torch.set_num_threads(1)
    seed = 1
    text = make_text(seed)
    tokens, targets = text[..., :-1], text[..., 1:]
    x, y = tokens[0, 0], targets[0, 0]
    settings = SIZES | RECIPE | dict(steps=STEPS, micro_batches=MICRO_BATCHES, B=B, T=T)
    settings |= {"torch": torch.__version__, "transformers": transformers.__version__}

    model = make_model(tied_head=True, seed=seed)
    logits, loss = forward_backward(model, x, y)
    check_against_transformers(model, x, y)
    tied = {"tokens": tokens, "targets": targets, "logits": logits, "loss": loss}
    for name, p in model.named_parameters():
        tied |= {f"weights.{name}": p.detach(), f"grads.{name}": p.grad}
    patch = mock.patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", newton_schulz_fp32)
    with patch:
        runs = {"muon_fp32": train(seed, tokens, targets, use_muon=True)}
    runs["muon_bf16"] = train(seed, tokens, targets, use_muon=True)
    runs["adamw"] = train(seed, tokens, targets, use_muon=False)
    for run, results in runs.items():
        print(run, "loss", *(f"{value:.4f}" for value in results["loss_after"]))
        print(run, "norm", *(f"{value:.4f}" for value in results["grad_norm"]))
        tied |= {f"{run}.{name}": value for name, value in results.items()}

    # The same weights but for a head of its own: what is new are the gradients of wte and lm_head.
    model = make_model(tied_head=False, seed=seed)
    logits, loss = forward_backward(model, x, y)
    check_against_transformers(model, x, y)
    untied = {"logits": logits, "loss": loss, "weights.lm_head.weight": model.lm_head.weight.detach()}
    for name, p in model.named_parameters():
        small = p.ndim == 1 or not name.startswith("h.")
        untied |= {f"grads.{name}": p.grad} if small else {f"grad_norms.{name}": p.grad.norm()}

    GOLDEN.mkdir(exist_ok=True)
    for file, tensors in [("tied", tied), ("untied", untied)]:
        stored = {name: t.to(torch.float32 if t.is_floating_point() else torch.int32).contiguous().clone()
                  for name, t in tensors.items()}
        path = GOLDEN / f"{file}.safetensors"
        # One entry: save_file writes several in random order, and the file shall be the same each time.
        save_file(stored, path, {"settings": json.dumps(settings)})
        print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
