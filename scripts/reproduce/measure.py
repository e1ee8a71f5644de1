"""The measurements: each a function that runs programs of this tree and returns numbers as JSON can hold
them."""

import hashlib
import itertools
import json
import math
import os
import random
import shlex
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from sizes import ADAMW, CONTENDERS, LEAN, MUON


class Failed(Exception):
    """A program that did not do what it was asked, with its own words."""


def version(programs):
    return subprocess.run(
        [str(Path(programs) / "train_gpt"), "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()


class Bench:
    """Where programs and folders are, and how to run one."""

    def __init__(self, size, out, programs, throughput_program, environment=None):
        self.size, self.out, self.programs = size, Path(out), Path(programs)
        self.throughput_program = Path(throughput_program or self.programs / "bench_throughput")
        self.environment = {"OMP_WAIT_POLICY": "passive", **os.environ, **(environment or {})}
        self.help = self.run([self.programs / "train_gpt", "--help"])
        self.version = version(self.programs)
        self.on_gpu = "cuda backend" in self.version

    def run(self, command):
        """Runs a command from the tree's root and returns what it printed."""
        done = subprocess.run(
            [str(word) for word in command], env=self.environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise Failed(lines[-1] if lines else f"status {done.returncode}")
        return done.stdout

    def shards(self, part):
        return f"{self.out}/novels_{part}_*.bin"

    def tokenize(self):
        """The two novels as bytes, once."""
        if not Path(f"{self.out}/novels_tokenizer.json").exists():
            self.run(
                [
                    self.programs / "train_gpt",
                    "tokenize",
                    "--input",
                    "data/text/sherlock_holmes.txt",
                    "data/text/tom_sawyer.txt",
                    "--out",
                    self.out / "novels",
                ]
            )


def command_text(command):
    return shlex.join(str(word) for word in command)


def throughput(bench, curve, difficulty, blocks, names, jobs=None):
    """AdamW and others in turns, in one process; see dev/bench/bench_throughput.cpp."""
    result_file = bench.out / "throughput.json"
    command = [
        bench.throughput_program,
        "--difficulty",
        difficulty,
        "--blocks",
        blocks,
        "--block-seconds",
        0.5 if bench.on_gpu else 0,
        "--json",
        result_file,
    ]
    for name in names:
        command += ["--contender", f"{name}: {CONTENDERS[name]}"]
    command += [
        "--",
        "--train-data",
        bench.shards("train"),
        "--dtype",
        bench.size.dtype,
        *curve.model.split(),
    ]
    bench.run(command)
    result = json.loads(result_file.read_text())
    return {**result, "difficulty": difficulty, "command": command_text(command)}


def read_log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def last_checkpoint(folder):
    return sorted(folder.glob("step_*"))[-1]


def train(bench, folder, options, extra=()):
    """One run of train_gpt in a folder of its own, thrown away if an earlier try left it unfinished."""
    folder = bench.out / "runs" / folder
    if not any(word == "--resume" for word in extra):
        shutil.rmtree(folder, ignore_errors=True)
    command = [
        bench.programs / "train_gpt",
        "--train-data",
        bench.shards("train"),
        "--val-data",
        bench.shards("val"),
        "--out",
        folder,
        *options.split(),
        *extra,
    ]
    bench.run(command)
    return folder, command_text(command)


def summary(folder, command):
    """What the page needs of a run's log."""
    log = read_log(folder)
    of = lambda kind: [line for line in log if line["type"] == kind]
    steps, config = of("train"), of("config")[-1]
    seconds, elapsed = {0: 0.0}, 0.0
    for line in steps:
        elapsed += line["ms"] / 1e3
        seconds[line["step"]] = elapsed
    median = lambda key: statistics.median(line[key] for line in steps)
    return {
        "command": command,
        "git": config["git"],
        "device": config["device"],
        "threads": config["threads"],
        "matmul_ceiling_flops": config["matmul_ceiling_flops"],
        "parameters": config["parameters"],
        "optimizer_state_bytes": config["optimizer_state_bytes"],
        "validation": [
            [line["step"], line["val_loss"], round(seconds[line["step"]], 3)] for line in of("val")
        ],
        "final": of("val")[-1]["val_loss"],
        "tokens_per_second": median("tokens_per_second"),
        "ms": median("ms"),
        "optimizer_ms": median("optimizer_ms"),
        "mfu": median("mfu"),
        "peak_bytes": of("done")[-1]["peak_bytes"],
        "skipped": of("done")[-1]["skipped"],
        "loss_scale": steps[-1]["loss_scale"],
    }


def training_options(size, name, learning_rate, seed, steps, dtype="fp32", state="fp32"):
    """The options of a run; of two with other optimizers, what --optimizer and the variant say is all that
    differs. state: a name of STATES."""
    return (
        f"{size.model} {size.batch} --steps {steps} --lr {learning_rate:g} --seed {seed} --dtype {dtype} "
        f"--val-every {size.val_every} --val-tokens {size.val_tokens} --sample-tokens 0 --keep 1 --threads 1 "
        f"{CONTENDERS[name]} {STATES[state]}"
    )


def training_run(bench, key, *arguments):
    """One run's summary; one that diverged or was refused says so."""
    try:
        folder, command = train(
            bench, key.replace("/", "_").replace(" ", "_"), training_options(bench.size, *arguments)
        )
    except Failed as failure:
        return {"failed": str(failure)}
    result = summary(folder, command)
    for checkpoint in folder.glob("step_*"):
        shutil.rmtree(checkpoint)
    return result


def fingerprint(folder):
    """The losses of all steps, in full precision, and the weights."""
    weights = hashlib.sha256((last_checkpoint(folder) / "model.safetensors").read_bytes()).hexdigest()
    return {
        "losses": [line["loss"] for line in read_log(folder) if line["type"] == "train"],
        "weights": weights,
    }


def bits(bench, name):
    """The same run in other ways; each must leave the same bits. Also what each rank sends in a step."""
    size, steps = bench.size, bench.size.bits_steps
    base = (
        f"{size.model} {size.bits_batch} --lr 4e-3 --val-every 0 --val-tokens {size.val_tokens // 8} "
        f"--sample-tokens 0 --virtual-ranks 4 {CONTENDERS[name]}"
    )
    ways = {
        "first": "--threads 1",
        "again": "--threads 1",
        "2 threads": "--threads 2",
        "2 ranks": "--threads 1 --ranks 2",
        "4 ranks": "--threads 1 --ranks 4",
        "2 ranks, no overlap": "--threads 1 --ranks 2 --no-overlap",
    }
    result = {"ways": {}, "traffic": {}, "commands": {}}
    for way, options in ways.items():
        try:
            folder, command = train(
                bench,
                f"bits_{name}_{way}".replace(" ", "_").replace(",", ""),
                f"{base} {options} --steps {steps}",
            )
        except Failed as failure:
            result["ways"][way] = {"failed": str(failure)}
            continue
        result["ways"][way], result["commands"][way] = fingerprint(folder), command
        done = [line for line in read_log(folder) if line["type"] == "done"][-1]
        if "rank" in way:
            ranks = int(way.split()[0])
            sent = {kind: sum(both) / steps / ranks for kind, both in done["bytes_sent_as"].items()}
            result["traffic"][way] = sent
    result["ways"]["resumed"] = resumed(bench, name, base, steps)
    return result


def resumed(bench, name, base, steps):
    """Killed halfway and taken up again, on two ranks: the steps of the whole run stay the same."""
    key = f"bits_{name}_resumed"
    folder = bench.out / "runs" / key
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder, _ = train(
            bench, key, f"{base} --threads 1 --steps {steps} --checkpoint-every {steps // 2} --keep 0"
        )
        # What an interrupted run leaves: its first half.
        shutil.rmtree(last_checkpoint(folder))
        train(bench, key, "", ["--resume", "--threads", "1", "--ranks", "2"])
    except Failed as failure:
        return {"failed": str(failure)}
    return fingerprint(folder)


SHOCKS = ["undisturbed", "learning rate x 3", "half the tokens", "random tokens"]


def make_noise(bench):
    """Shards of random bytes, once."""
    if not Path(f"{bench.out}/noise_tokenizer.json").exists():
        draw = random.Random(1)
        (bench.out / "noise").write_bytes(bytes(draw.randrange(1, 256) for _ in range(300000)))
        bench.run(
            [
                bench.programs / "train_gpt",
                "tokenize",
                "--input",
                bench.out / "noise",
                "--out",
                bench.out / "noise",
            ]
        )


def branch(bench, source, key):
    """A copy of a finished run as it was in its middle."""
    folder = bench.out / "runs" / key
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    shutil.rmtree(last_checkpoint(folder))
    return folder


def random_tokens(bench, folder, learning_rate, steps):
    """Random tokens in place of text for some steps from the middle on, at the learning rate that the cosine
    has in their middle; then the text from its beginning."""
    until, warmup = steps // 2 + max(1, min(20, steps // 6)), steps // 10
    middle = (until + steps // 2) / 2
    rate = learning_rate * (1 + math.cos(math.pi * (middle - warmup) / (steps - warmup))) / 2
    program = [bench.programs / "train_gpt", "--out", folder, "--resume", "--new-data", "--threads", "1"]
    bench.run(
        [
            *program,
            "--train-data",
            bench.shards("train").replace("novels", "noise"),
            "--steps",
            until,
            "--schedule",
            "constant",
            "--lr",
            f"{rate:.6g}",
        ]
    )
    bench.run(
        [
            *program,
            "--train-data",
            bench.shards("train"),
            "--steps",
            steps,
            "--schedule",
            "cosine",
            "--lr",
            f"{learning_rate:g}",
        ]
    )


def shocks(bench, name, learning_rate, seed, adapt):
    """Final losses of a run that nothing disturbs, and of what each shock makes of it."""
    size, steps, losses, commands = bench.size, bench.size.shock_steps, {}, {}
    final = lambda folder: [line["val_loss"] for line in read_log(folder) if line["type"] == "val"][-1]
    key = f"shock_{name}_{seed}_{'adapt' if adapt else 'plain'}"
    options = (
        f"{size.model} {size.shock_batch} --virtual-ranks 4 --steps {steps} --seed {seed} --val-every 0 "
        f"--val-tokens {size.val_tokens} --sample-tokens 0 --checkpoint-every {steps // 2} --keep 0 "
        f"--threads 1 "
        f"{CONTENDERS[name]} {'--lr-adapt' if adapt else ''}"
    )
    whole, commands["undisturbed"] = train(bench, key, f"{options} --lr {learning_rate:g}")
    losses["undisturbed"] = final(whole)
    folder, commands["learning rate x 3"] = train(bench, key + "_x3", f"{options} --lr {3 * learning_rate:g}")
    losses["learning rate x 3"] = final(folder)
    folder = branch(bench, whole, key + "_half")
    bench.run(
        [
            bench.programs / "train_gpt",
            "--out",
            folder,
            "--resume",
            "--threads",
            "1",
            "--tokens-per-step",
            int(size.shock_batch.split()[-1]) // 2,
        ]
    )
    losses["half the tokens"] = final(folder)
    folder = branch(bench, whole, key + "_noise")
    random_tokens(bench, folder, learning_rate, steps)
    losses["random tokens"] = final(folder)
    return {"losses": losses, "commands": commands}


# The optimizer's state in fp32, Muon's momentum in bf16, all of it in bf16.
STATES = {"fp32": "", "momentum": "--muon-state-dtype bf16", "bf16": "--state-dtype bf16"}


def plan(bench, options):
    return json.loads(bench.run([bench.programs / "bench_plan", "--", *options.split()]))


def plans(bench):
    """Memory and traffic by the program's own plans, of shapes that need not fit this machine."""
    result = {}
    states = [(ADAMW, "fp32"), (ADAMW, "bf16"), *((MUON, state) for state in STATES)]
    for shape, (name, state) in itertools.product(bench.size.shapes, states):
        for dtype, recompute in itertools.product(("fp32", "bf16"), ("none", "block")):
            options = (
                f"--model {shape} --dtype {dtype} --reduce-dtype {dtype} --recompute {recompute} "
                f"{CONTENDERS[name]} {STATES[state]}"
            )
            result[f"{shape}/{name}/{dtype}/state {state}/recompute {recompute}"] = plan(bench, options)
    # The trained size: what the allocator counted stands beside it in the runs.
    for name in (ADAMW, MUON, LEAN):
        if bench.size.model:
            options = f"{bench.size.model} {bench.size.batch} --vocab-size 257 {CONTENDERS[name]}"
            result[f"trained/{name}"] = plan(bench, options)
    return result


def machine():
    """What the numbers belong to."""
    cpu, memory = "unknown", 0
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_bytes": memory,
        "system": " ".join(os.uname()[i] for i in (0, 2, 4)),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def git_hash():
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
