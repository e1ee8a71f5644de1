"""scripts/reproduce_98.sh: runs what is missing of a size's measurements, then writes the report."""

import argparse
import concurrent.futures
import os
import sys
import time
from pathlib import Path

import measure
import page
import plan
import readme
import verdicts
from results import Results
from sizes import SIZES


def parse():
    parser = argparse.ArgumentParser(
        prog="reproduce_98.sh", description="Checks the project's claims on this machine."
    )
    parser.add_argument("--quick", action="store_true", help="six minutes on 2 cores; short for --size quick")
    parser.add_argument("--size", choices=sorted(SIZES), help="default: full on a CPU, gpu on a GPU")
    parser.add_argument("--out", help="folder of the report; default: runs/reproduce_98_<size>")
    parser.add_argument(
        "--programs", help="folder of train_gpt, bench_throughput and bench_plan; default: builds them"
    )
    parser.add_argument("--throughput-program", help="in place of bench_throughput")
    parser.add_argument("--only", help="subjects, comma between: memory, throughput, training, bits, shocks")
    parser.add_argument(
        "--jobs", type=int, help="training runs at a time, a thread each; default: the cores; 1 on a GPU"
    )
    parser.add_argument(
        "--page",
        metavar="RESULTS",
        help="writes the report from a results.json again, beside it or " "to --out; measures nothing",
    )
    parser.add_argument(
        "--readme",
        nargs=2,
        metavar=("RESULTS", "README"),
        help="writes the claim table of a results.json into a README, between its markers",
    )
    return parser.parse_args()


class Progress:
    """A line for each measurement, with the time that the rest should take."""

    def __init__(self, weight):
        self.start, self.weight, self.done = time.monotonic(), weight, 0.0

    def report(self, key, weight, seconds, said=""):
        self.done += weight
        elapsed = time.monotonic() - self.start
        left = max(0.0, elapsed * (self.weight - self.done) / self.done) if self.done else 0.0
        minutes = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        print(f"[{elapsed:6.0f} s] {key}: {seconds:.1f} s{said}; about {minutes} left", flush=True)


def perform(task):
    """What a task measured, or why it could not be; and its seconds."""
    start = time.monotonic()
    try:
        value = task.work()
    except measure.Failed as failure:
        value = {"failed": str(failure)}
    return value, time.monotonic() - start


def run_stage(tasks, results, progress, jobs):
    """Those that are timed one by one, the others `jobs` at a time. Stops at the first interrupt."""
    for task in [task for task in tasks if results.done(task.key)]:
        progress.weight -= task.weight
    missing = [task for task in tasks if not results.done(task.key)]

    def finish(task, value, seconds):
        results.put(task.key, value)
        said = f" FAILED: {value['failed']}" if isinstance(value, dict) and "failed" in value else ""
        progress.report(task.key, task.weight, seconds, said)

    for task in [task for task in missing if task.alone]:
        finish(task, *perform(task))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(perform, task): task for task in missing if not task.alone}
        try:
            for future in concurrent.futures.as_completed(futures):
                finish(futures[future], *future.result())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def choose_size(options, programs):
    if options.quick and options.size not in (None, "quick"):
        raise SystemExit("reproduce_98.sh: --quick and --size " + options.size + " are two sizes")
    name = "quick" if options.quick else options.size
    if name is None:
        name = "gpu" if "cuda" in measure.version(programs) else "full"
    return SIZES[name]


def run(options):
    programs = (
        Path(options.programs)
        if options.programs
        else Path(os.path.relpath(Path("train_gpt").resolve().parent))
    )
    needed = [programs / name for name in ("train_gpt", "bench_throughput", "bench_plan")]
    for program in [*needed, Path(options.throughput_program or needed[1])]:
        if not os.access(program, os.X_OK):
            sys.exit(f"reproduce_98.sh: {program}: is not there; `make reproduce` builds it")
    size = choose_size(options, programs)
    if options.only:
        size.only = options.only.split(",")
    out = Path(options.out or f"runs/reproduce_98_{size.name}")
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out, size.name)
    bench = measure.Bench(size, out, programs, options.throughput_program)
    bench.tokenize()
    results.data.setdefault(
        "about",
        {
            "program": bench.version,
            "git": measure.git_hash(),
            **measure.machine(),
            "command": measure.command_text(["scripts/reproduce_98.sh", *sys.argv[1:]]),
        },
    )
    results.write()
    jobs = options.jobs or (1 if bench.on_gpu else len(os.sched_getaffinity(0)))
    print(f"size {size.name} ({size.about}); {bench.version}; results in {out}", flush=True)
    progress = Progress(plan.total_weight(bench))
    for tasks in plan.stages(bench, results):
        run_stage(tasks, results, progress, jobs)
    results.data["about"]["seconds"] = (
        results.data["about"].get("seconds", 0) + time.monotonic() - progress.start
    )
    results.write()
    write_report(size, results, out)


def write_report(size, results, out):
    rows = verdicts.judge_all(size, results)
    results.data["verdicts"] = [vars(row) for row in rows]
    results.write()
    (out / "report.html").write_text(page.html_report(size, results, rows))
    (out / "report.md").write_text(page.markdown_report(size, results, rows))
    for row in rows:
        print(f"{row.verdict:20} {row.claim}: {row.measured}")
    print(f"report: {out}/report.html, {out}/report.md, {out}/results.json")


def main():
    options = parse()
    if options.readme:
        return readme.write(*options.readme)
    if options.page:
        results = Results.of_file(options.page)
        out = Path(options.out or Path(options.page).parent)
        out.mkdir(parents=True, exist_ok=True)
        results.path = out / "results.json"
        return write_report(SIZES[results.data["size"]], results, out)
    return run(options)


try:
    main()
except measure.Failed as failure:
    sys.exit(f"reproduce_98.sh: {failure}")
except KeyboardInterrupt:
    sys.exit("reproduce_98.sh: stopped; the same command goes on from here")
