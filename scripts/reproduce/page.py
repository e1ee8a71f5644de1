"""The report, from the numbers and verdicts: one HTML page that needs nothing else, and the same in
Markdown."""

import re
import statistics
from html import escape
from pathlib import Path

import svg
import verdicts
from sizes import ADAMW, LEAN, MUON

COLOURS = {ADAMW: "adamw", MUON: "muon", LEAN: "lean"}
STYLE = Path(__file__).with_name("style.css").read_text()


def marked_up(words):
    """Plain text with `code` as HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(words))


def claim_rows(rows):
    lines = []
    for row in rows:
        css = row.verdict.split()[0]
        note = f'<div class="note">{marked_up(row.note)}</div>' if row.note else ""
        lines.append(
            f'<tr><td>{marked_up(row.claim)}</td><td data-label="source">{marked_up(row.source)}</td>'
            f'<td data-label="measured">{marked_up(row.measured)}{note}</td>'
            f'<td data-label="verdict"><span class="verdict {css}">{row.verdict}</span></td>'
            f'<td data-label="how" class="soft">{marked_up(row.how)}</td></tr>'
        )
    return "\n".join(lines)


def legend(names):
    return (
        '<p class="legend soft">'
        + "".join(f'<span class="{COLOURS[name]}"><i></i>{escape(name)}</span>' for name in names)
        + "</p>"
    )


def figure(caption, drawing):
    return f"<figure><figcaption>{marked_up(caption)}</figcaption>{drawing}</figure>" if drawing else ""


def table(head, rows):
    """On a phone, where more than three columns would not fit, each row becomes a card."""
    heads = "".join(f"<th>{marked_up(name)}</th>" for name in head)
    row_of = lambda row: "".join(
        f'<td data-label="{escape(name)}">{marked_up(str(cell))}</td>' for name, cell in zip(head, row)
    )
    css = "number cards" if len(head) > 3 else "number"
    return (
        f'<div class="wide"><table class="{css}"><thead><tr>{heads}</tr></thead><tbody>'
        + "".join(f"<tr>{row_of(row)}</tr>" for row in rows)
        + "</tbody></table></div>"
    )


# -----------------------------------------------------------------------------------------------------------
# Sections: HTML, "" where nothing was measured. Tables are built apart, for Markdown has them too.


def curve_points(curve, results):
    keys = [f"throughput/{curve.name}/{difficulty:g}" for difficulty, _ in curve.points]
    return [results.get(key) for key in keys if results.get(key) and "failed" not in results.get(key)]


THROUGHPUT_HEAD = [
    "tokens/step",
    "contender",
    "N.-S. of the model's FLOPs",
    "tokens/s: median [least, most]",
    "of AdamW's: blocks",
    "by parts",
    "TFLOP/s",
    "of the matmul ceiling",
    "optimizer ms",
]


def throughput_row(point, one):
    rates = [point["tokens_per_step"] / seconds for seconds in one["seconds"]]
    rate = statistics.median(rates)
    flops = rate * point["flops_per_token"]
    ratio = (
        ["", ""]
        if one["name"] == ADAMW
        else [
            verdicts.by_blocks(point, one["name"]).per_cent(),
            verdicts.by_parts(point, one["name"]).per_cent(),
        ]
    )
    return [
        f"{point['tokens_per_step']:,}",
        one["name"],
        f"{100 * verdicts.share(point, one['name']):.2f} %",
        f"{rate:,.0f} [{min(rates):,.0f}, {max(rates):,.0f}]",
        *ratio,
        f"{flops / 1e12:.3g}",
        f"{100 * flops / point['matmul_ceiling_flops']:.0f} %",
        f"{1e3 * statistics.median(one['optimizer_seconds']):.2f}",
    ]


def throughput_tables(size, results):
    """(title, head, rows) of each curve and of the ablation."""
    found = []
    for curve in size.throughput:
        points = curve_points(curve, results)
        rows = [throughput_row(point, one) for point in points for one in point["contenders"]]
        if rows:
            found.append(
                (
                    f"{curve.name}: dense Newton-Schulz is 5 % of the model at "
                    f"{points[0]['equal_difficulty_tokens']:,.0f} tokens/step",
                    THROUGHPUT_HEAD,
                    rows,
                )
            )
        ablation = results.get(f"ablation/{curve.name}")
        if ablation and "failed" not in ablation:
            found.append(
                (
                    f"{curve.name}: what each step of Newton-Schulz saves, at equal difficulty",
                    THROUGHPUT_HEAD,
                    [throughput_row(ablation, one) for one in ablation["contenders"]],
                )
            )
    return found


def throughput_plot(size, results):
    drawings = []
    for curve in size.throughput:
        points = curve_points(curve, results)
        if len(points) < 2:
            continue
        series = []
        for name in (MUON, LEAN):
            ratios = [(point["tokens_per_step"], verdicts.ratio(point, name)[0]) for point in points]
            series.append(
                svg.Series(
                    name,
                    COLOURS[name],
                    [(tokens, 100 * r.middle, 100 * r.low, 100 * r.high) for tokens, r in ratios],
                    dots=True,
                )
            )
        axes = svg.Axes(
            "tokens a step",
            "tokens/s, % of AdamW's",
            log_x=True,
            x_marks=[(points[0]["equal_difficulty_tokens"], "equal difficulty")],
            y_marks=[(98, "98 %")],
        )
        drawings.append(
            figure(
                f"Muon's tokens a second in shares of AdamW's, {curve.name}. Points are medians, "
                "bars their intervals.",
                svg.curves("throughput", series, axes),
            )
        )
    return "".join(drawings)


def loss_plots(size, results):
    found = {name: verdicts.at_best_rate(size, results, name) for name in (ADAMW, MUON, LEAN)}
    drawings, tokens = [], int(size.batch.split()[-1])
    for column, label, factor in ((0, "tokens", tokens), (2, "seconds of training", 1)):
        series, ends = [], []
        for name, runs in found.items():
            for run in runs.values():
                series.append(
                    svg.Series(
                        name,
                        COLOURS[name],
                        [(factor * p[column], p[1]) for p in run["validation"]],
                        faint=True,
                    )
                )
            mean = [(factor * point[column], point[1]) for point in verdicts.mean_curve(runs)] if runs else []
            series.append(svg.Series(name, COLOURS[name], mean))
            ends += [point[1] for point in mean]
        if not ends:
            return ""
        axes = svg.Axes(label, "validation loss, nats", y_format="{:.1f}")
        drawings.append(
            figure(
                f"Validation loss over {label}: the mean of {len(size.seeds)} seeds, thin each seed; "
                "all at AdamW's best learning rate.",
                svg.curves(label, series, axes),
            )
        )
    return "".join(drawings)


def sweep_plot(size, results):
    series = [
        svg.Series(
            name,
            COLOURS[name],
            [(rate, loss) for rate, loss in verdicts.sweep_losses(size, results, name) if loss is not None],
            dots=True,
        )
        for name in (ADAMW, MUON)
    ]
    if not all(one.points for one in series):
        return ""
    axes = svg.Axes("learning rate", "final validation loss", log_x=True, y_format="{:.2f}")
    drawing = svg.curves("learning rates", series, axes)
    return figure(f"Final loss by learning rate, one seed, {size.steps} steps.", drawing)


def gigabytes(number):
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"


def memory_plot(size, results):
    plans = results.get("memory/plans")
    if not plans or "failed" in plans:
        return ""
    drawings = []
    for key, caption, recompute in (
        ("optimizer_state_bytes", "Optimizer state", "none"),
        ("all_bytes", "All memory, 4 rows of 1,024 tokens, fp32", "none"),
    ):
        groups = []
        for shape in size.shapes:
            of = lambda name, state: plans[f"{shape}/{name}/fp32/state {state}/recompute {recompute}"][key]
            adamw, muon, half = of(ADAMW, "fp32"), of(MUON, "fp32"), of(MUON, "momentum")
            share = lambda value: f"{gigabytes(value)}, {100 * (value / adamw - 1):.1f} %"
            groups.append(
                (
                    size.shape_names[shape],
                    [
                        ("AdamW", "adamw", adamw, gigabytes(adamw)),
                        ("Muon", "muon", muon, share(muon)),
                        ("Muon, bf16", "half", half, share(half)),
                    ],
                )
            )
        drawings.append(
            figure(
                f"{caption}: AdamW, Muon, and (pale) Muon with `--muon-state-dtype bf16`.",
                svg.bars(caption, groups, "bytes, by plan"),
            )
        )
    return "".join(drawings)


def traffic_plot(size, results):
    adamw, muon = (verdicts.measured_traffic(results, name) for name in (ADAMW, MUON))
    ways = [way for way in ("2 ranks", "4 ranks") if way in adamw and way in muon]
    if not ways:
        return ""
    groups = [
        (
            way,
            [
                ("AdamW", "adamw", adamw[way], gigabytes(adamw[way])),
                ("Muon", "muon", muon[way], gigabytes(muon[way])),
            ],
        )
        for way in ways
    ]
    ratio = verdicts.steps_ratio(size, results) if size.learning_rates else None
    if ratio:
        whole = {way: (size.steps * adamw[way], ratio * size.steps * muon[way]) for way in ways}
        loss = [
            (
                way,
                [
                    ("AdamW", "adamw", a, gigabytes(a)),
                    ("Muon", "muon", m, f"{gigabytes(m)}, {100 * (m / a - 1):+.0f} %"),
                ],
            )
            for way, (a, m) in whole.items()
        ]
        second = figure(
            "The same up to AdamW's final loss.", svg.bars("traffic to a loss", loss, "bytes sent by a rank")
        )
    else:
        second = ""
    return (
        figure(
            "Gradients and weights that a rank sends in a step, counted.",
            svg.bars("traffic a step", groups, "bytes a rank and step"),
        )
        + second
    )


def memory_table(size, results):
    head = [
        "model",
        "types",
        "AdamW's state",
        "Muon's state",
        "Muon, bf16 momentum",
        "all: Muon",
        "all: Muon, bf16 momentum",
        "largest micro-batch in 24 GiB: AdamW, Muon, Muon bf16 momentum",
    ]
    plans, rows = results.get("memory/plans"), []
    if not plans or "failed" in plans:
        return head, rows
    for shape in size.shapes:
        for dtype in ("fp32", "bf16"):
            for recompute in ("none", "block"):
                of = lambda name, state: plans[f"{shape}/{name}/{dtype}/state {state}/recompute {recompute}"]
                three = [of(ADAMW, "fp32"), of(MUON, "fp32"), of(MUON, "momentum")]
                state, whole = ([one[key] for one in three] for key in ("optimizer_state_bytes", "all_bytes"))
                less = lambda values, i: f"{100 * (values[i] / values[0] - 1):.1f} %"
                rows.append(
                    [
                        size.shape_names[shape],
                        dtype + ("" if recompute == "none" else ", --recompute block"),
                        f"{state[0]:,}",
                        f"{state[1]:,}, {less(state, 1)}",
                        f"{state[2]:,}, {less(state, 2)}",
                        less(whole, 1),
                        less(whole, 2),
                        ", ".join(str(one["largest_batch"]["24"]) for one in three),
                    ]
                )
    return head, rows


def traffic_table(size, results):
    head = ["model", "ranks", "gradients, AdamW", "gradients, Muon", "weights, AdamW", "weights, Muon"]
    plans, rows = results.get("memory/plans"), []
    for shape in size.shapes if plans and "failed" not in plans else []:
        for ranks in ("2", "4", "8"):
            of = lambda name: plans[f"{shape}/{name}/bf16/state fp32/recompute none"]["traffic"][ranks]
            rows.append(
                [
                    size.shape_names[shape],
                    ranks,
                    *(f"{of(name)[kind]:,}" for kind in ("gradients", "weights") for name in (ADAMW, MUON)),
                ]
            )
    return head, rows


def sweep_table(size, results):
    head = ["learning rate", ADAMW, MUON]
    both = [verdicts.sweep_losses(size, results, name) for name in (ADAMW, MUON)]
    say = lambda loss: f"{loss:.4f}" if loss is not None else "failed"
    return head, [[f"{rate:g}", say(adamw), say(muon)] for (rate, adamw), (_, muon) in zip(*both)]


def convergence_table(size, results):
    head = [
        "contender",
        "learning rate",
        *(f"seed {seed}" for seed in size.seeds),
        "to AdamW",
        "tokens/s",
        "optimizer ms",
    ]
    rows, best = [], verdicts.best_rate(size, results, ADAMW)
    reference = verdicts.at_best_rate(size, results, ADAMW)
    own = verdicts.best_rate(size, results, MUON)
    for name, rate in dict.fromkeys([(ADAMW, best), (MUON, best), (LEAN, best), (MUON, own)]):
        runs = verdicts.runs_of(results, name, rate, size.steps, seeds=size.seeds)
        differences = verdicts.paired(runs, reference)
        if differences:
            say = lambda seed: f"{runs[seed]['final']:.4f}" if seed in runs else "failed"
            median = lambda key: statistics.median(run[key] for run in runs.values())
            rows.append(
                [
                    name,
                    f"{rate:g}",
                    *map(say, size.seeds),
                    f"{100 * statistics.mean(differences):+.2f} %",
                    f"{median('tokens_per_second'):,.0f}",
                    f"{median('optimizer_ms'):.1f}",
                ]
            )
    return head, rows


def precision_table(size, results):
    head = ["optimizer", "weights and activations", "state", "to fp32", "two σ of the seeds", "skipped steps"]
    return head, [
        [
            name,
            dtype,
            "bf16 momentum" if state == "momentum" else state,
            f"{100 * mean:+.4f} %",
            f"{100 * noise:.3f} %",
            skipped,
        ]
        for name, dtype, state, mean, noise, skipped in verdicts.precision_rows(size, results)
    ]


def bits_table(results):
    head, rows = ["way", ADAMW, MUON], []
    found = [results.get(f"bits/{name}") for name in (ADAMW, MUON)]
    if not all(found) or any("failed" in f for f in found):
        return head, rows
    say = lambda f, way: (
        "could not be run"
        if "failed" in f["ways"][way]
        else ("the same bits" if f["ways"][way] == f["ways"]["first"] else "OTHER BITS")
    )
    return head, [[way, *(say(f, way) for f in found)] for way in found[0]["ways"] if way != "first"]


def shocks_table(size, results):
    head = ["shock", *(f"seed {seed}: plain, --lr-adapt" for seed in size.seeds), "difference"]
    losses = verdicts.shock_losses(size, results)
    return head, [
        [
            shock,
            *(f"{plain:.4f}, {adapted:.4f}" for plain, adapted in pairs),
            f"{100 * statistics.mean(adapted / plain - 1 for plain, adapted in pairs):+.2f} %",
        ]
        for shock, pairs in losses.items()
        if len(pairs) == len(size.seeds)
    ]


def command_lines(size, results):
    """Every command, once."""
    commands = []
    for value in results.data["measurements"].values():
        commands += [value["command"]] if "command" in value else list(value.get("commands", {}).values())
    return commands


def sections(size, results):
    """(title, text, plots, tables) of what was measured."""
    found = (
        [
            (
                "Throughput",
                "One process, the contenders in turns, a block of steps each, the order reversed "
                "from one round to "
                "the next; the same data, seed, type and micro-batch. `Blocks` is the median of the rounds' "
                "ratios; `by parts` takes forward and backward from all blocks, being the same code "
                "for all, and "
                "each optimizer's own time; it alone counts where other processes took more than a "
                "quarter of a core, or where the blocks' bracket is wider than 2 %. In brackets what holds the true median with 93 %. At the point of equal "
                "difficulty dense "
                "Newton-Schulz is 5 % of the model's FLOPs, as it was in NVIDIA's runs.",
                throughput_plot(size, results),
                throughput_tables(size, results),
            )
        ]
        if size.wants("throughput")
        else []
    )
    if size.wants("training") and size.learning_rates:
        found.append(
            (
                "Convergence and one option",
                f"{verdicts.model_text(size)}; text of two novels as bytes.",
                loss_plots(size, results) + sweep_plot(size, results),
                [
                    ("Final validation loss", *convergence_table(size, results)),
                    ("Learning rates, first seed", *sweep_table(size, results)),
                ],
            )
        )
        found.append(
            (
                "Precision",
                f"The same model for {size.precision_steps} steps; mean differences from fp32, paired by "
                "seed.",
                "",
                [("", *precision_table(size, results))],
            )
        )
    if size.wants("memory"):
        found.append(
            (
                "Memory",
                "By the plans that the program allocates by, without the ops' scratch; 4 rows of 1,024 "
                "tokens. Gradients are fp32 whatever the types.",
                memory_plot(size, results),
                [("", *memory_table(size, results))],
            )
        )
        found.append(
            (
                "Traffic",
                "What a rank sends in a step. The table is by the program's own plan, in bf16; the "
                "plots are counted while ranks of this machine trained.",
                traffic_plot(size, results),
                [("Bytes a rank and step, on one node", *traffic_table(size, results))],
            )
        )
    if size.wants("bits"):
        found.append(
            (
                "Reproducibility",
                "Against a first run: losses of every step and the hash of the weights.",
                "",
                [("", *bits_table(results))],
            )
        )
    if size.wants("shocks") and verdicts.shock_losses(size, results):
        found.append(
            (
                "Adaptive learning rate",
                f"Muon's final loss after {size.shock_steps} steps: undisturbed; at three "
                "times the learning rate; with half the tokens a step from the middle on; with "
                "random tokens for "
                "some steps after the middle.",
                "",
                [("", *shocks_table(size, results))],
            )
        )
    return found


def about_text(results):
    about = results.data["about"]
    device = next(
        (value["device"] for value in results.data["measurements"].values() if "device" in value), ""
    )
    busy = [
        value["cores_of_other_processes"]
        for value in results.data["measurements"].values()
        if "cores_of_other_processes" in value
    ]
    load = (
        f" While throughput was measured, other processes kept {min(busy):.1f} to {max(busy):.1f} cores busy."
        if busy
        else ""
    )
    return (
        f"Size {results.data['size']}, {about['date']}, {about['seconds'] / 60:.0f} minutes. {about['cpu']}, "
        f"{about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB; {device}. "
        f"{about['program']}.{load} "
        f"Command: `{about['command']}`."
    )


def html_report(size, results, rows):
    body = []
    for title, words, plots, tables in sections(size, results):
        body.append(f"<h2>{title}</h2><p class='soft'>{marked_up(words)}</p>")
        if plots:
            body.append(legend((ADAMW, MUON, LEAN)) + f'<div class="plots">{plots}</div>')
        for caption, head, lines in tables:
            body.append(
                (f"<h3>{escape(caption)}</h3>" if caption and lines else "")
                + (table(head, lines) if lines else "")
            )
    commands = "".join(f"<p><code>{escape(command)}</code></p>" for command in command_lines(size, results))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>muGPT: the claim, measured</title><style>{STYLE}</style></head><body>
<h1>muGPT: Muon against AdamW, measured</h1>
<p class="soft">{marked_up(about_text(results))}</p>
<table class="cards"><thead><tr><th>claim</th><th>source's figure</th><th>measured here</th><th>verdict</th>
<th>how measured</th></tr></thead><tbody>
{claim_rows(rows)}
</tbody></table>
{"".join(body)}
<h2>Command lines</h2><details><summary>all of them</summary>{commands}</details>
</body></html>
"""


def markdown_table(head, rows):
    cell = lambda value: str(value).replace("|", "\\|")
    return (
        "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in [head, ["---"] * len(head), *rows])
        + "\n"
    )


def claim_table(rows):
    """The claim table in Markdown, for the report and the README."""
    return markdown_table(
        ["claim", "source's figure", "measured here", "verdict", "how measured"],
        [[row.claim, row.source, row.measured, f"**{row.verdict}**", row.how] for row in rows],
    )


def markdown_report(size, results, rows):
    parts = ["# muGPT: Muon against AdamW, measured\n", about_text(results) + "\n", claim_table(rows)]
    parts += [f"- **{row.claim}.** {row.note}" for row in rows if row.note] + [""]
    for title, words, _, tables in sections(size, results):
        parts.append(f"## {title}\n\n{words}\n")
        for caption, head, lines in tables:
            if lines:
                parts.append((f"**{caption}**\n\n" if caption else "") + markdown_table(head, lines))
    parts.append("## Command lines\n\n```\n" + "\n".join(command_lines(size, results)) + "\n```")
    return "\n".join(parts) + "\n"
