"""The measurements of a size in their order, each a key, a weight and a function; later ones may depend on
what earlier ones found."""

from dataclasses import dataclass
from typing import Callable

import measure
import verdicts
from sizes import ABLATION, ADAMW, LEAN, MUON


@dataclass
class Task:
    key: str
    weight: float  # in proportion to the time that it takes
    work: Callable
    alone: bool = False  # nothing else may run, as it is timed


def throughput_tasks(bench):
    tasks = []
    for curve in bench.size.throughput:
        names = (ADAMW, MUON, LEAN)
        for difficulty, blocks in curve.points:

            def work(curve=curve, difficulty=difficulty, blocks=blocks):
                return measure.throughput(bench, curve, difficulty, blocks, names)

            tasks.append(Task(f"throughput/{curve.name}/{difficulty:g}", 3 * difficulty * blocks, work, True))
        if curve.ablation_blocks:

            def work(curve=curve):
                return measure.throughput(bench, curve, 1, curve.ablation_blocks, (ADAMW, *ABLATION))

            tasks.append(Task(f"ablation/{curve.name}", 7 * curve.ablation_blocks, work, True))
    return tasks


def run_task(bench, key, name, learning_rate, seed, steps, *types):
    return Task(
        key, 0.35 * steps, lambda: measure.training_run(bench, key, name, learning_rate, seed, steps, *types)
    )


def run_key(name, learning_rate, seed, steps, dtype="fp32", state="fp32"):
    return f"run/{name}/lr {learning_rate:g}/seed {seed}/steps {steps}/{dtype}/state {state}"


def runs(bench, combinations):
    """Tasks of training runs, each once. A combination: name, learning rate, seed, steps, dtype, state."""
    keys = {run_key(*combination): combination for combination in combinations}
    return [run_task(bench, key, *combination) for key, combination in keys.items()]


def sweep(size):
    return [(name, rate, size.seeds[0], size.steps) for rate in size.learning_rates for name in (ADAMW, MUON)]


def convergence(size, results):
    """At AdamW's best learning rate, all; and Muon also at its own best."""
    rate, own = verdicts.best_rate(size, results, ADAMW), verdicts.best_rate(size, results, MUON)
    names = [(ADAMW, rate), (MUON, rate), (LEAN, rate), (MUON, own)]
    return [(name, at, seed, size.steps) for name, at in names for seed in size.seeds]


def precision(size, results):
    rate = verdicts.best_rate(size, results, ADAMW)
    return [
        (name, rate, seed, size.precision_steps, dtype, state)
        for name in (ADAMW, MUON)
        for dtype, state in verdicts.precision_types(name)
        for seed in size.seeds
    ]


def shock_tasks(bench, results):
    """With and without --lr-adapt, where the program has it; at AdamW's best learning rate."""
    if "--lr-adapt" not in bench.help:
        return []
    rate = verdicts.best_rate(bench.size, results, ADAMW)
    measure.make_noise(bench)
    return [
        Task(
            verdicts.shock_key(rate, seed, adapt),
            0.35 * 3 * bench.size.shock_steps,
            lambda seed=seed, adapt=adapt: measure.shocks(bench, MUON, rate, seed, adapt),
        )
        for seed in bench.size.seeds
        for adapt in (False, True)
    ]


def stages(bench, results):
    """Lists of tasks, one after the other; what a list holds may depend on the ones before."""
    size = bench.size
    yield [Task("memory/plans", 20, lambda: measure.plans(bench))] if size.wants("memory") else []
    yield throughput_tasks(bench) if size.wants("throughput") else []
    if size.wants("training"):
        yield runs(bench, sweep(size))
        yield runs(bench, convergence(size, results)) + runs(bench, precision(size, results))
    if size.wants("bits"):
        yield [
            Task(f"bits/{name}", 20, lambda name=name: measure.bits(bench, name), True)
            for name in (ADAMW, MUON)
        ]
    yield shock_tasks(bench, results) if size.wants("shocks") else []


def total_weight(bench):
    """Of all stages, as far as it can be said before anything is known."""
    size = bench.size
    total = sum(task.weight for task in throughput_tasks(bench)) + 20 if size.wants("throughput") else 20
    if size.wants("training"):
        counted = len(sweep(size)) + 2 * len(size.seeds) + 2 * (len(size.seeds) - 1)
        total += 0.35 * (counted * size.steps + 7 * len(size.seeds) * size.precision_steps)
    if size.wants("shocks") and "--lr-adapt" in bench.help:
        total += 0.35 * 3 * size.shock_steps * 2 * len(size.seeds)
    return total + (40 if size.wants("bits") else 0)
