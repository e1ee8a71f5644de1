"""Checks a muGPT checkpoint folder with Hugging Face's transformers.

    MUGPT_EXPORT_DIR=/tmp/export build/cpu/test_checkpoint --gtest_filter='Export.*'
    python dev/reference/check_transformers.py /tmp/export/tied /tmp/export/untied

Each argument is a folder with a checkpoint, step_*, and logits.safetensors: `tokens` (T) and the `logits`
(T, V) that muGPT computes for them. transformers must load the checkpoint without a missing or unexpected
tensor, compute the same logits to 1e-4, write back the same model.safetensors, and load the tokenizer where
there is one.
"""

import pathlib
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2LMHeadModel

TOLERANCE = 1e-4


class Mismatch(Exception):
    """What muGPT wrote is not what transformers expects."""


def require(condition, message):
    if not condition:
        raise Mismatch(message)


def check_logits(model, export):
    """The largest difference of the logits: absolute, and relative to the largest logit."""
    expected = load_file(export / "logits.safetensors")
    with torch.no_grad():
        logits = model(expected["tokens"].long()[None]).logits[0]
    require(logits.shape == expected["logits"].shape, f"logits have shape {tuple(logits.shape)}")
    absolute = (logits - expected["logits"]).abs().max().item()
    relative = absolute / expected["logits"].abs().max().item()
    print(f"  logits {tuple(logits.shape)}: max absolute difference {absolute:.3g}, relative {relative:.3g}")
    require(relative <= TOLERANCE, f"logits differ by more than {TOLERANCE}")


def check_weights(model, checkpoint):
    """What transformers saves from the model that it loaded is tensor for tensor what muGPT saved."""
    ours = load_file(checkpoint / "model.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        theirs = load_file(pathlib.Path(folder) / "model.safetensors")
    require(ours.keys() == theirs.keys(), f"tensors differ: {sorted(ours.keys() ^ theirs.keys())}")
    for name, tensor in ours.items():
        require(torch.equal(tensor, theirs[name]), f"{name} differs")
    print(f"  {len(ours)} tensors: the same when transformers saves them")


def check_tokenizer(checkpoint, vocab_size):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokens = len(tokenizer)
    require(tokens == vocab_size, f"the tokenizer has {tokens} tokens, the model {vocab_size}")
    text = "Hello, Welt!\r\n\t \x00\x7f äöü 漢字 \U0001f600  "
    ids = tokenizer.encode(text)
    require(tokenizer.decode(ids) == text, "the tokenizer does not give the text back")
    if vocab_size == 257:  # the byte tokenizer: ids are bytes, and one token ends a text
        require(ids == list(text.encode()), "ids are not the text's bytes")
        require(tokenizer.eos_token_id == 256, f"eos_token_id is {tokenizer.eos_token_id}")
    print(f"  tokenizer: {len(ids)} tokens, back to the same text")


def check(export):
    checkpoint = sorted(export.glob("step_*"))[-1]
    print(checkpoint)
    model, info = GPT2LMHeadModel.from_pretrained(checkpoint, output_loading_info=True)
    problems = {kind: keys for kind, keys in info.items() if keys}
    require(not problems, f"loading was not clean: {problems}")
    model.eval()
    check_logits(model, export)
    check_weights(model, checkpoint)
    if (checkpoint / "tokenizer.json").exists():
        check_tokenizer(checkpoint, model.config.vocab_size)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for export in sys.argv[1:]:
        try:
            check(pathlib.Path(export))
        except Mismatch as error:
            sys.exit(f"{export}: {error}")
    print("ok")


if __name__ == "__main__":
    main()
