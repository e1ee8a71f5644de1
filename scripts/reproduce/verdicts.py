"""What the numbers say of each claim: confirmed, refuted, or not measurable here. Nothing here measures."""

import math
import statistics
from dataclasses import dataclass

from sizes import ADAMW, CONTENDERS, LEAN, MUON

CONFIRMED, REFUTED, UNMEASURED = "confirmed", "refuted", "not measurable here"


@dataclass
class Verdict:
    """A row of the claim table. Texts are plain."""

    key: str
    claim: str
    source: str
    measured: str
    verdict: str
    how: str
    note: str = ""  # e.g. with what it would be confirmed


@dataclass
class Interval:
    low: float
    middle: float
    high: float

    def per_cent(self, digits=1):
        return f"{100 * self.middle:.{digits}f} % [{100 * self.low:.{digits}f}, {100 * self.high:.{digits}f}]"


def median_interval(values):
    """The median with an interval that holds the true one with 93 % probability or more, whatever the
    distribution: between order statistics, by the binomial one. Of less than five values the whole range."""
    values, n, cut, tail = sorted(values), len(values), 0, 0.0
    while True:
        tail += math.comb(n, cut) / 2**n  # that at most `cut` values lie on one side
        if 1 - 2 * tail < 0.93 or 2 * (cut + 1) >= n:
            break
        cut += 1
    cut = max(cut - 1, 0)
    return Interval(values[cut], statistics.median(values), values[n - 1 - cut])


def judge(interval, gate):
    """Against a gate that must be reached; None where the interval holds it, and noise hides the answer."""
    if interval.low >= gate:
        return CONFIRMED
    return REFUTED if interval.high < gate else None


# -----------------------------------------------------------------------------------------------------------
# Throughput


def contender(point, name):
    return next(c for c in point["contenders"] if c["name"] == name)


def by_blocks(point, name):
    """Tokens a second of one, in shares of AdamW's in the same round."""
    pairs = zip(contender(point, ADAMW)["seconds"], contender(point, name)["seconds"])
    return median_interval([adamw / other for adamw, other in pairs])


def by_parts(point, name):
    """The same from the parts of a step: forward and backward, which are the same code for all and so may be
    taken from all blocks, and each optimizer's own time. Less noise, but blind to what an optimizer does to
    the next forward."""
    model = statistics.median(
        whole - part for c in point["contenders"] for whole, part in zip(c["seconds"], c["optimizer_seconds"])
    )
    adamw = median_interval(contender(point, ADAMW)["optimizer_seconds"])
    other = median_interval(contender(point, name)["optimizer_seconds"])
    ratio = lambda a, b: (model + a) / (model + b)
    return Interval(
        ratio(adamw.low, other.high), ratio(adamw.middle, other.middle), ratio(adamw.high, other.low)
    )


QUIET_CORES = 0.25


def quiet(point):
    """Whether a CPU had (nearly) nothing else to do: where others take cores by turns, so few blocks can
    differ by luck more than their interval says."""
    return not point["device"].startswith("CPU") or point.get("cores_of_other_processes", 0) <= QUIET_CORES


RESOLUTION = 0.02


def steady(interval):
    """Whether blocks can tell what is to be told: a machine that is shared with others outside its sight can be
    quiet and yet change its speed by more than the two optimizers differ."""
    return interval.high - interval.low <= RESOLUTION


def ratio(point, name):
    """What to show of a point, and how it came about: by blocks on a quiet and steady machine, else by parts."""
    blocks = by_blocks(point, name)
    return (blocks, "blocks") if quiet(point) and steady(blocks) else (by_parts(point, name), "parts")


def judge_point(point, name, gate):
    """Verdict, interval and how."""
    interval, how = ratio(point, name)
    verdict = judge(interval, gate)
    return (verdict, interval, how) if verdict is not None else (UNMEASURED, interval, f"{how}, noise")


def all_of(verdicts):
    """Of several gates: one that is missed refutes."""
    for verdict in (REFUTED, UNMEASURED):
        if verdict in verdicts:
            return verdict
    return CONFIRMED


def gates_of(size, results):
    """The first curve's points that have a gate: (point, gate)."""
    curve = size.throughput[0]
    points = [
        (results.get(f"throughput/{curve.name}/{difficulty:g}"), gate) for difficulty, gate in size.gates
    ]
    return [(point, gate) for point, gate in points if point and "failed" not in point]


def judge_throughput(size, results, name):
    found = [judge_point(point, name, gate)[0] for point, gate in gates_of(size, results)]
    return all_of(found + [UNMEASURED] * (len(size.gates) - len(found)))


def share(point, name):
    """Newton-Schulz's FLOPs in the model's."""
    return contender(point, name)["newton_schulz_flops"] / (
        point["flops_per_token"] * point["tokens_per_step"]
    )


THROUGHPUT_HOW = {
    "blocks": ")",
    "parts": ", by parts)",
    "blocks, noise": ", noise hides the answer)",
    "parts, noise": ", by parts, noise hides the answer)",
}


def point_text(point, name, gate):
    _, interval, how = judge_point(point, name, gate)
    text = f"{interval.per_cent()} at {point['tokens_per_step']:,} tokens/step (gate {100 * gate:g} %, "
    text += f"Newton-Schulz {100 * share(point, name):.2f} % of the model's FLOPs"
    return text + THROUGHPUT_HOW[how]


def throughput(size, results):
    gates = gates_of(size, results)
    if not gates:
        return Verdict(
            "throughput",
            "98 % of AdamW's tokens a second",
            THROUGHPUT_SOURCE,
            "nothing",
            UNMEASURED,
            "the measurement failed or is still to come",
        )
    verdict = judge_throughput(size, results, MUON)
    note = "Default settings. "
    if verdict != CONFIRMED:
        lean = judge_throughput(size, results, LEAN)
        texts = "; ".join(point_text(point, LEAN, gate) for point, gate in gates)
        note += f"{lean.capitalize()} with `{CONTENDERS[LEAN]}`: {texts}. "
    note += same_settings(size, results)
    if gates[0][0]["device"].startswith("CPU"):
        note += (
            " On a CPU Newton-Schulz runs at the model's own rate: where dense products would be 5 % of the "
            "FLOPs, those cannot pass 95 %, Gram Newton-Schulz 97.5 %, nor Gram cubic5, the default, 98.2 %."
        )
    measured = "; ".join(point_text(point, MUON, gate) for point, gate in gates)
    point = gates[0][0]
    return Verdict(
        "throughput",
        "98 % of AdamW's tokens a second",
        THROUGHPUT_SOURCE,
        measured,
        verdict,
        f"{size.throughput[0].name}, {point['dtype']}: one process, the two in turns, "
        f"{len(contender(point, MUON)['seconds'])} blocks each; the median and its interval",
        note,
    )


def same_settings(size, results):
    """Convergence and memory of the settings whose throughput a row names."""
    texts = []
    for name in (MUON, LEAN):
        loss, state = loss_difference(size, results, name), trained_state(results, name)
        if loss is not None and state is not None:
            texts.append(f"{name}: final loss {loss:+.2f} % of AdamW's, optimizer state {state:+.1f} %")
    return "The same settings when trained: " + "; ".join(texts) + "." if texts else ""


THROUGHPUT_SOURCE = "NVIDIA: 97.9 % (Kimi K2, 256 GB300), 96.2 % (Qwen3-30B, 8 GB300), MXFP8"
NO_SOURCE = "no public source found"

# -----------------------------------------------------------------------------------------------------------
# Trained runs


def runs_of(results, name, learning_rate, steps, dtype="fp32", state="fp32", seeds=()):
    """The summaries by seed; those that failed are left out."""
    found = {}
    for seed in seeds:
        run = results.get(f"run/{name}/lr {learning_rate:g}/seed {seed}/steps {steps}/{dtype}/state {state}")
        if run and "failed" not in run and math.isfinite(run["final"]):
            found[seed] = run
    return found


def sweep_losses(size, results, name):
    """Learning rate and final loss of the first seed; None where the run failed."""
    losses = []
    for rate in size.learning_rates:
        runs = runs_of(results, name, rate, size.steps, seeds=size.seeds[:1])
        losses.append((rate, runs[size.seeds[0]]["final"] if runs else None))
    return losses


def best_rate(size, results, name):
    losses = [(loss, rate) for rate, loss in sweep_losses(size, results, name) if loss is not None]
    return min(losses)[1] if losses else size.learning_rates[0]


def at_best_rate(size, results, name):
    """Runs at AdamW's best learning rate."""
    if not size.learning_rates:
        return {}
    return runs_of(results, name, best_rate(size, results, ADAMW), size.steps, seeds=size.seeds)


def paired(ours, theirs):
    """Relative differences of final losses, seed by seed."""
    return [ours[seed]["final"] / theirs[seed]["final"] - 1 for seed in ours if seed in theirs]


def loss_difference(size, results, name):
    differences = paired(at_best_rate(size, results, name), at_best_rate(size, results, ADAMW))
    return 100 * statistics.mean(differences) if differences else None


def trained_state(results, name):
    plans = results.get("memory/plans") or {}
    if f"trained/{name}" not in plans:
        return None
    bytes_of = lambda which: plans[f"trained/{which}"]["optimizer_state_bytes"]
    return 100 * (bytes_of(name) / bytes_of(ADAMW) - 1)


def mean_curve(runs):
    """Validation loss over steps and over seconds, the mean of the seeds."""
    points = zip(*(run["validation"] for run in runs.values()))
    return [[statistics.mean(column) for column in zip(*same_step)] for same_step in points]


def steps_to(curve, target):
    """The first step at which a curve has come down to a loss, between validations linearly; None: never."""
    for before, after in zip(curve, curve[1:]):
        if after[1] <= target:
            part = (before[1] - target) / (before[1] - after[1]) if before[1] > after[1] else 1.0
            return before[0] + max(0.0, part) * (after[0] - before[0])
    return None


def steps_ratio(size, results, name=MUON):
    """Steps to AdamW's mean final loss, in shares of AdamW's; None where it is never reached."""
    adamw, other = at_best_rate(size, results, ADAMW), at_best_rate(size, results, name)
    if not adamw or not other:
        return None
    target = statistics.mean(run["final"] for run in adamw.values())
    steps = steps_to(mean_curve(other), target)
    return steps / size.steps if steps is not None else None


def better_than_adamw(size, results, name=MUON):
    """Whether every seed ends lower, or every one higher."""
    differences = paired(at_best_rate(size, results, name), at_best_rate(size, results, ADAMW))
    if len(differences) < min(3, len(size.seeds)):
        return UNMEASURED, differences
    if max(differences) < 0:
        return CONFIRMED, differences
    return (REFUTED if min(differences) > 0 else UNMEASURED), differences


def model_text(size):
    return f"`{size.model}`, {size.steps} steps, `{size.batch}`"


def convergence(size, results):
    claim, source = (
        "A lower loss for the same tokens",
        "Wen et al. (arXiv:2509.02046): 1.4 times fewer steps at 0.1B",
    )
    verdict, differences = better_than_adamw(size, results)
    if not differences:
        return Verdict("convergence", claim, source, "nothing", UNMEASURED, "no runs")
    ratio = steps_ratio(size, results)
    measured = (
        f"final validation loss {100 * statistics.mean(differences):+.2f} % over {len(differences)} seeds "
    )
    measured += f"[{100 * min(differences):+.2f}, {100 * max(differences):+.2f}]; AdamW's final loss after "
    measured += f"{100 * ratio:.0f} % of its steps" if ratio else "none of its steps"
    return Verdict(
        "convergence",
        claim,
        source,
        measured,
        verdict,
        f"{model_text(size)}, both at AdamW's best learning rate of the sweep, "
        f"{best_rate(size, results, ADAMW):g}; refuted or confirmed where all seeds agree",
    )


def one_line(size, results):
    claim = "One option to switch, nothing to tune"
    source = "PyTorch's `match_rms_adamw` and Moonlight reuse the learning rate; Megatron's one flag does not"
    adamw, muon = (at_best_rate(size, results, name) for name in (ADAMW, MUON))
    seed = next((seed for seed in adamw if seed in muon), None)
    if seed is None:
        return Verdict("one line", claim, source, "nothing", UNMEASURED, "no runs")
    differ = [
        pair
        for pair in zip(adamw[seed]["command"].split(), muon[seed]["command"].split())
        if pair[0] != pair[1] and "/runs/run_" not in pair[0]
    ]
    only_optimizer = differ == [("adamw", "muon")]
    wins = [
        (a, m)
        for (_, a), (_, m) in zip(sweep_losses(size, results, ADAMW), sweep_losses(size, results, MUON))
        if a is not None and m is not None
    ]
    no_worse = sum(m <= a for a, m in wins)
    verdict, differences = better_than_adamw(size, results)
    if not only_optimizer:
        verdict = REFUTED
    own = best_rate(size, results, MUON)
    measured = (
        f"the command lines differ in `--optimizer` {'alone' if only_optimizer else 'and more'}; at "
        f"AdamW's best "
        f"learning rate Muon's loss is {100 * statistics.mean(differences):+.2f} %; no worse at "
        f"{no_worse} of "
        f"{len(wins)} learning rates; its own best is {own:g}"
    )
    return Verdict(
        "one line",
        claim,
        source,
        measured,
        verdict,
        f"learning rates {', '.join(f'{rate:g}' for rate in size.learning_rates)}, seed {size.seeds[0]}; "
        "confirmed where no seed is worse at AdamW's best",
    )


def precision_types(name):
    """Types of weights and activations, and of the state, by their names in the runs' keys; the first is what
    the others are compared with."""
    types = [("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32")]
    return types + [("fp32", "momentum")] if name == MUON else types


def precision_rows(size, results):
    """(optimizer, dtype, state, mean difference from fp32, two standard deviations of fp32's losses,
    skipped)."""
    rate, rows = best_rate(size, results, ADAMW), []
    of = lambda *types: runs_of(results, *types[:1], rate, size.precision_steps, *types[1:], seeds=size.seeds)
    for name in (ADAMW, MUON):
        reference = of(name)
        if len(reference) < 2:
            continue
        finals = [run["final"] for run in reference.values()]
        noise = 2 * statistics.stdev(finals) / statistics.mean(finals)
        for dtype, state in precision_types(name)[1:]:
            runs = of(name, dtype, state)
            differences = paired(runs, reference)
            if len(differences) == len(reference):
                skipped = sum(run["skipped"] for run in runs.values())
                rows.append((name, dtype, state, statistics.mean(differences), noise, skipped))
    return rows


PRECISION_TOLERANCE = 0.005  # of the final loss


def precision(size, results):
    claim = "FP16 and BF16 without tuning"
    source = "Megatron's Muon refuses FP16; " + NO_SOURCE
    rows = [row for row in precision_rows(size, results) if row[2] == "fp32"] if size.learning_rates else []
    if len(rows) < 4:
        return Verdict("precision", claim, source, "nothing", UNMEASURED, "no runs, or some failed")
    worst = max(rows, key=lambda row: abs(row[3]))
    outside = [row for row in rows if abs(row[3]) > PRECISION_TOLERANCE]
    beyond_noise = any(abs(row[3]) > row[4] for row in outside)
    verdict = CONFIRMED if not outside else REFUTED if beyond_noise else UNMEASURED
    return Verdict(
        "precision",
        claim,
        source,
        f"largest difference from FP32: {100 * worst[3]:+.3f} % ({worst[0]}, {worst[1]}), where two standard "
        f"deviations of the seeds are {100 * worst[4]:.3f} %; {sum(row[5] for row in rows)} steps skipped",
        verdict,
        f"final loss after {size.precision_steps} steps, {len(size.seeds)} seeds, paired; both "
        f"optimizers, default options otherwise; confirmed where all means are within "
        f"{100 * PRECISION_TOLERANCE:g} %, refuted where one is beyond that and two standard deviations",
    )


# -----------------------------------------------------------------------------------------------------------
# Memory and traffic


def saved(plans, shape, key, dtype="fp32", muon_state="fp32", recompute="none", adamw_state="fp32"):
    """What Muon saves of AdamW's bytes, as a negative share."""
    adamw = plans[f"{shape}/{ADAMW}/{dtype}/state {adamw_state}/recompute {recompute}"][key]
    return plans[f"{shape}/{MUON}/{dtype}/state {muon_state}/recompute {recompute}"][key] / adamw - 1


def state(size, results):
    claim = "Optimizer state halved (-50 %)"
    plans = results.get("memory/plans")
    if not plans:
        return Verdict("state", claim, NO_SOURCE, "nothing", UNMEASURED, "no plans")
    values = {size.shape_names[shape]: saved(plans, shape, "optimizer_state_bytes") for shape in size.shapes}
    verdict = CONFIRMED if max(values.values()) <= -0.5 else REFUTED
    bf16 = [saved(plans, shape, "optimizer_state_bytes", muon_state="momentum") for shape in size.shapes]
    note = (
        f"{(CONFIRMED if max(bf16) <= -0.5 else REFUTED).capitalize()} with `--muon-state-dtype "
        f"bf16`, all else of "
        f"both optimizers in fp32: {100 * bf16[0]:.1f} to {100 * bf16[-1]:.1f} %. With `--state-dtype "
        f"bf16` on both "
        "sides the shares are as in fp32."
    )
    measured = ", ".join(f"{100 * value:.1f} % ({name})" for name, value in values.items())
    return Verdict(
        "state",
        claim,
        NO_SOURCE + "; DeepSpeed: roughly -45 %",
        measured,
        verdict,
        "bytes of the optimizer's arena at GPT-2's shapes, both in fp32, by the plan that is allocated",
        note,
    )


def memory(size, results):
    claim = "12 % less memory in all"
    plans = results.get("memory/plans")
    if not plans:
        return Verdict("memory", claim, NO_SOURCE, "nothing", UNMEASURED, "no plans")
    values = {size.shape_names[shape]: saved(plans, shape, "all_bytes") for shape in size.shapes}
    verdict = CONFIRMED if values[size.shape_names[size.shapes[0]]] <= -0.12 else REFUTED
    block = [saved(plans, shape, "all_bytes", recompute="block") for shape in size.shapes]
    note = (
        f"{(CONFIRMED if max(block) <= -0.12 else REFUTED).capitalize()} with `--recompute block` for both: "
        f"{100 * block[0]:.1f} to {100 * block[-1]:.1f} %."
    )
    peaks = [
        runs.get(size.seeds[0]) for runs in (at_best_rate(size, results, name) for name in (ADAMW, MUON))
    ]
    if all(peaks):
        note += (
            f" The trained model's peak by the allocator: {peaks[0]['peak_bytes']:,} and "
            f"{peaks[1]['peak_bytes']:,} bytes, "
            f"{100 * (peaks[1]['peak_bytes'] / peaks[0]['peak_bytes'] - 1):+.1f} %."
        )
    measured = ", ".join(f"{100 * value:.1f} % ({name})" for name, value in values.items())
    return Verdict(
        "memory",
        claim,
        NO_SOURCE + "; DeepSpeed: -9 % (Qwen2.5-3B)",
        measured,
        verdict,
        "weights, gradients, state and activations of 4 rows of 1,024 tokens, fp32, by the plan that is "
        "allocated; judged at 124M, the default model",
        note,
    )


def measured_traffic(results, name):
    """Bytes of gradients and weights that a rank sends in a step, by number of ranks."""
    found = results.get(f"bits/{name}") or {"traffic": {}}
    return {ways: sent["gradients"] + sent["weights"] for ways, sent in found["traffic"].items()}


def traffic_step(size, results):
    claim = "8 % less traffic, a step"
    adamw, muon = (measured_traffic(results, name) for name in (ADAMW, MUON))
    ways = [way for way in ("2 ranks", "4 ranks") if way in adamw and way in muon]
    source = NO_SOURCE + "; Megatron's Muon of 26.02 sent 1.5 to 1.67 times AdamW's bytes"
    if not ways:
        return Verdict(
            "traffic a step", claim, source, "nothing", UNMEASURED, "several ranks could not be run here"
        )
    values = {way: muon[way] / adamw[way] - 1 for way in ways}
    verdict = CONFIRMED if max(values.values()) <= -0.08 else REFUTED
    return Verdict(
        "traffic a step",
        claim,
        source,
        ", ".join(f"{100 * value:+.2f} % ({way})" for way, value in values.items()),
        verdict,
        "gradients and weights that a rank sent, by the counters of the program",
    )


def traffic_to_loss(size, results):
    claim = "8 % less traffic, to the same loss"
    adamw, muon = (measured_traffic(results, name) for name in (ADAMW, MUON))
    ratio = steps_ratio(size, results) if size.learning_rates else None
    way = "2 ranks"
    if way not in adamw or way not in muon or not at_best_rate(size, results, MUON):
        return Verdict(
            "traffic to a loss", claim, NO_SOURCE, "nothing", UNMEASURED, "needs several ranks and the runs"
        )
    if ratio is None:
        return Verdict(
            "traffic to a loss",
            claim,
            NO_SOURCE,
            "AdamW's final loss is not reached",
            REFUTED,
            "the trained runs",
        )
    value = ratio * muon[way] / adamw[way] - 1
    return Verdict(
        "traffic to a loss",
        claim,
        NO_SOURCE,
        f"{100 * value:+.0f} %",
        CONFIRMED if value <= -0.08 else REFUTED,
        "bytes a step times the steps to AdamW's mean final loss, both at AdamW's best learning rate",
    )


# -----------------------------------------------------------------------------------------------------------
# Reproducibility, adaptive learning rate


def unequal_ways(found):
    """Ways whose bits differ from the first run's, and ways that could not be run."""
    first = found["ways"]["first"]
    failed = [way for way, result in found["ways"].items() if "failed" in result]
    return [way for way, result in found["ways"].items() if way not in failed and result != first], failed


def reproducibility(size, results):
    claim, source = "The same result everywhere", "Megatron's layouts are not bit-equal; " + NO_SOURCE
    found = {name: results.get(f"bits/{name}") for name in (ADAMW, MUON)}
    if not all(found.values()) or any(
        "failed" in (f.get("ways", {}).get("first") or {"failed": 1}) for f in found.values()
    ):
        return Verdict("reproducibility", claim, source, "nothing", UNMEASURED, "no runs")
    unequal, failed = zip(*(unequal_ways(f) for f in found.values()))
    ways = [way for way in found[MUON]["ways"] if way != "first" and way not in failed[1]]
    verdict = REFUTED if any(unequal) else CONFIRMED
    measured = "the same bits: " + ", ".join(way for way in ways if not any(way in u for u in unequal))
    if any(unequal):
        measured += "; others: " + ", ".join(sorted({way for u in unequal for way in u}))
    note = (
        f"Could not be run here: {', '.join(sorted(set(failed[0]) | set(failed[1])))}." if any(failed) else ""
    )
    return Verdict(
        "reproducibility",
        claim,
        source,
        measured,
        verdict,
        "losses of every step and the weights' SHA-256, both optimizers, 4 virtual ranks",
        note,
    )


def shock_key(learning_rate, seed, adapt):
    return f"shocks/{MUON}/lr {learning_rate:g}/seed {seed}/{'--lr-adapt' if adapt else 'plain'}"


def shock_losses(size, results):
    """By shock: the final losses (plain, with --lr-adapt) of each seed that has both."""
    rate, found = best_rate(size, results, ADAMW), {}
    for seed in size.seeds:
        both = [results.get(shock_key(rate, seed, adapt)) for adapt in (False, True)]
        if all(run and "failed" not in run for run in both):
            for shock in both[0]["losses"]:
                found.setdefault(shock, []).append(tuple(run["losses"][shock] for run in both))
    return found


def adaptive(size, results):
    claim = "A learning rate that adapts to gradient noise"
    losses = shock_losses(size, results) if size.learning_rates else {}
    if not losses or len(losses["undisturbed"]) < max(2, len(size.seeds)):
        return Verdict(
            "adaptive",
            claim,
            NO_SOURCE,
            "nothing",
            UNMEASURED,
            "this program has no `--lr-adapt`, or runs failed",
        )
    if all(plain == adapted for pairs in losses.values() for plain, adapted in pairs):
        too_short = f"`--lr-adapt` has not acted within the {size.shock_steps} steps of this size"
        return Verdict("adaptive", claim, NO_SOURCE, "no difference", UNMEASURED, too_short)
    mean = {
        shock: statistics.mean(adapted / plain - 1 for plain, adapted in pairs)
        for shock, pairs in losses.items()
    }
    plain = [pair[0] for pair in losses["undisturbed"]]
    noise = statistics.stdev(plain) / statistics.mean(plain)
    no_worse = mean["undisturbed"] <= noise
    better = all(
        adapted < plain
        for shock, pairs in losses.items()
        if shock != "undisturbed"
        for plain, adapted in pairs
    )
    return Verdict(
        "adaptive",
        claim,
        NO_SOURCE,
        "final loss with `--lr-adapt` against without: "
        + ", ".join(f"{100 * value:+.2f} % ({shock})" for shock, value in mean.items())
        + f"; a standard deviation of the seeds is {100 * noise:.2f} %",
        CONFIRMED if no_worse and better else REFUTED,
        f"Muon, {size.shock_steps} steps, 4 virtual ranks, {len(size.seeds)} seeds; confirmed where "
        f"undisturbed "
        "it is no worse than by a standard deviation, and better in every seed of every shock",
    )


def judge_all(size, results):
    """The claim table."""
    rows = [throughput(size, results)] if size.wants("throughput") else []
    rows += [state(size, results), memory(size, results)] if size.wants("memory") else []
    if size.wants("training"):
        rows += [convergence(size, results), precision(size, results), one_line(size, results)]
    if size.wants("bits"):
        rows += [traffic_step(size, results), traffic_to_loss(size, results), reproducibility(size, results)]
    rows += [adaptive(size, results)] if size.wants("shocks") else []
    return rows
