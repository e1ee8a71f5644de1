"""What is measured: the contenders, and how large each experiment is in each size of the script."""

from dataclasses import dataclass, field

# Settings by name: the options that a user would give. The first two differ in the one that matters.
CONTENDERS = {
    "AdamW": "--optimizer adamw",
    "Muon": "--optimizer muon",
    "Muon dense": "--optimizer muon --muon-ns polar-express --muon-ns-variant dense",
    "Muon symmetric": "--optimizer muon --muon-ns polar-express --muon-ns-variant symmetric",
    "Muon Gram": "--optimizer muon --muon-ns polar-express --muon-ns-variant gram",
    "Muon, pairs of heads": "--optimizer muon --muon-qk-group 2",
    "Muon lean": "--optimizer muon --muon-qk-group 2 --muon-state-dtype bf16",
}
ADAMW, MUON, LEAN = "AdamW", "Muon", "Muon lean"
# From the most work to the least: what each step of it saves. The default is Gram with the cubics of cubic5.
ABLATION = ["Muon dense", "Muon symmetric", "Muon Gram", MUON, "Muon, pairs of heads", LEAN]


@dataclass
class Throughput:
    """A curve over tokens a step of one model. Points are (difficulty, blocks): multiples of the tokens at
    which dense Newton-Schulz is 5 % of the model's FLOPs."""

    name: str
    model: str
    points: list
    ablation_blocks: int = 0  # at difficulty 1; 0: none


@dataclass
class Size:
    name: str
    about: str
    throughput: list
    gates: list  # (difficulty, least share of AdamW's tokens a second), of the first curve
    model: str = ""  # of the trained runs
    batch: str = "--batch-size 32 --tokens-per-step 4096"
    steps: int = 0
    val_every: int = 16
    val_tokens: int = 32768
    learning_rates: list = field(default_factory=list)
    seeds: list = field(default_factory=lambda: [1, 2, 3])
    precision_steps: int = 0
    bits_steps: int = 4
    bits_batch: str = "--batch-size 8 --tokens-per-step 4096"
    shock_steps: int = 0
    shock_batch: str = (
        "--batch-size 4 --tokens-per-step 4096"  # half a step is a row of each of 4 leaves, at least
    )
    dtype: str = "fp32"  # of the throughput
    shapes: list = field(default_factory=lambda: ["d12", "d24", "d36", "d48"])
    shape_names: dict = field(
        default_factory=lambda: {"d12": "124M", "d24": "350M", "d36": "774M", "d48": "1.5B"}
    )
    only: list = field(default_factory=list)  # subjects; none: all

    def wants(self, subject):
        return not self.only or subject in self.only


GATES = [(1, 0.98), (10, 0.995)]
BYTES = "--vocab-size 257"
SIZES = {
    size.name: size
    for size in [
        # A test of the machinery: its gate lies where a healthy Muon passes on any machine and one that does
        # Newton-Schulz eight times does not.
        Size(
            "smoke",
            "a minute, on any machine; a test of the script, not of the claim",
            [
                Throughput(
                    "2 layers, 64 channels",
                    f"--layers 2 --heads 2 --channels 64 --seq-len 64 --batch-size 16 {BYTES}",
                    [(1, 5), (2, 25)],
                    ablation_blocks=5,
                )
            ],
            gates=[(2, 0.93)],
            model="--layers 1 --heads 2 --channels 64 --seq-len 64",
            batch="--batch-size 16 --tokens-per-step 1024",
            steps=8,
            val_every=2,
            val_tokens=2048,
            learning_rates=[2e-3, 8e-3],
            seeds=[1, 2],
            precision_steps=4,
            shock_steps=8,
            shock_batch="--batch-size 2 --tokens-per-step 1024",
            bits_batch="--batch-size 4 --tokens-per-step 1024",
            shapes=["d12", "d48"],
        ),
        Size(
            "quick",
            "six minutes on 2 cores",
            [
                Throughput(
                    "2 layers, 128 channels",
                    f"--layers 2 --heads 4 --channels 128 --seq-len 128 --batch-size 8 {BYTES}",
                    [(0.25, 9), (1, 9), (10, 5)],
                    ablation_blocks=7,
                )
            ],
            gates=GATES,
            model="--layers 2 --heads 4 --channels 128 --seq-len 128",
            steps=64,
            val_every=8,
            learning_rates=[1e-3, 2e-3, 4e-3, 8e-3],
            precision_steps=16,
            shock_steps=24,
        ),
        Size(
            "full",
            "up to two hours on 2 cores",
            [
                Throughput(
                    "4 layers, 192 channels",
                    f"--layers 4 --heads 6 --channels 192 --seq-len 128 --batch-size 16 {BYTES}",
                    [(0.25, 15), (1, 11), (3, 7), (10, 5)],
                    ablation_blocks=7,
                ),
                Throughput(
                    "6 layers, 384 channels",
                    f"--layers 6 --heads 6 --channels 384 --seq-len 256 --batch-size 8 {BYTES}",
                    [(1, 5)],
                ),
            ],
            gates=GATES,
            model="--layers 4 --heads 4 --channels 128 --seq-len 128",
            steps=256,
            learning_rates=[5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
            precision_steps=128,
            shock_steps=128,
        ),
        Size(
            "gpu",
            "seven minutes on a data-centre GPU",
            [
                Throughput(
                    "GPT-2 124M", "--model d12 --batch-size 8", [(1, 9), (3, 5), (12.9, 5)], ablation_blocks=5
                )
            ],
            gates=[(1, 0.98), (12.9, 0.995)],
            model="--layers 2 --heads 4 --channels 128 --seq-len 128",
            steps=64,
            val_every=8,
            learning_rates=[1e-3, 2e-3, 4e-3, 8e-3],
            precision_steps=16,
            shock_steps=24,
            dtype="bf16",
        ),
        # For the simulator of CUDA, which has a thousandth of a GPU's speed.
        Size(
            "tiny",
            "a test of the script on the simulator",
            [
                Throughput(
                    "1 layer, 64 channels",
                    f"--layers 1 --heads 2 --channels 64 --seq-len 16 --batch-size 1 {BYTES}",
                    [(0.004, 5)],
                )
            ],
            gates=[(0.004, 0.98)],
            dtype="bf16",
            shapes=["d12"],
            only=["throughput", "memory"],
        ),
    ]
}
