"""Tests of scripts/reproduce_98.sh: its arithmetic and verdicts on numbers made up here, then its smallest size
from end to end, where a Muon that does Newton-Schulz eight times over must be refuted by the same verdicts.

    python3 dev/test/test_reproduce.py        needs `make reproduce build/<backend>/bench_handicapped`
"""

import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "reproduce"))
import page  # noqa: E402
import readme  # noqa: E402
import verdicts  # noqa: E402
from results import Results  # noqa: E402
from sizes import ADAMW, CONTENDERS, GATES, LEAN, MUON, SIZES  # noqa: E402
from verdicts import CONFIRMED, REFUTED, UNMEASURED  # noqa: E402

PROGRAMS = os.environ.get("PROGRAMS", "build/cpu")


def point(adamw, muon, optimizer=(0.0, 0.0), device="a GPU"):
    """A throughput measurement of two contenders, by their blocks' seconds."""
    contenders = [
        {
            "name": name,
            "seconds": seconds,
            "optimizer_seconds": [update] * len(seconds),
            "newton_schulz_flops": flops,
        }
        for name, seconds, update, flops in (
            (ADAMW, adamw, optimizer[0], 0.0),
            (MUON, muon, optimizer[1], 5e9),
            (LEAN, muon, optimizer[1], 1e9),
        )
    ]
    return {
        "contenders": contenders,
        "tokens_per_step": 1000,
        "flops_per_token": 1e8,
        "device": device,
        "dtype": "fp32",
        "matmul_ceiling_flops": 1e12,
        "equal_difficulty_tokens": 1000.0,
    }


class Numbers:
    """Stands for a results.json."""

    def __init__(self, measurements):
        self.data = {"measurements": measurements}

    def get(self, key):
        return self.data["measurements"].get(key)


def throughput_of(at_equal, at_ten):
    size = SIZES["quick"]
    name = size.throughput[0].name
    return verdicts.throughput(
        size, Numbers({f"throughput/{name}/1": at_equal, f"throughput/{name}/10": at_ten})
    )


class Intervals(unittest.TestCase):
    def test_order_statistics_of_the_sign_test(self):
        # The largest k whose interval from the k-th to the (n+1-k)-th value holds the median with 93 %, by
        # the binomial distribution: of 8, the second to the seventh hold it with 92.97 %, of 5, all with
        # 93.75 %.
        for n, k in ((3, 1), (5, 1), (7, 1), (8, 1), (9, 2), (10, 2), (11, 3), (15, 4), (20, 6), (25, 8)):
            interval = verdicts.median_interval(range(1, n + 1))
            self.assertEqual((interval.low, interval.high), (k, n + 1 - k), n)
            self.assertEqual(interval.middle, (n + 1) / 2)

    def test_a_gate_inside_the_interval_decides_nothing(self):
        interval = verdicts.Interval(0.97, 0.975, 0.99)
        self.assertEqual(verdicts.judge(interval, 0.97), CONFIRMED)
        self.assertEqual(verdicts.judge(interval, 0.995), REFUTED)
        self.assertIsNone(verdicts.judge(interval, 0.98))


class Throughput(unittest.TestCase):
    steady = [1.0, 1.001, 0.999, 1.0, 1.002]

    def test_gates(self):
        self.assertEqual(GATES, [(1, 0.98), (10, 0.995)])
        scaled = lambda factor: [factor * seconds for seconds in self.steady]
        fast, slow = point(self.steady, scaled(1.003)), point(self.steady, scaled(1.03))
        self.assertEqual(throughput_of(fast, fast).verdict, CONFIRMED)
        self.assertEqual(throughput_of(slow, fast).verdict, REFUTED)
        self.assertEqual(throughput_of(point(self.steady, scaled(1.01)), slow).verdict, REFUTED)
        self.assertEqual(throughput_of(fast, point(self.steady, scaled(1.01))).verdict, REFUTED)

    def test_noise_is_said_and_parts_see_through_it(self):
        noisy = [1.0, 1.5, 0.8, 1.2, 0.9]
        self.assertEqual(
            throughput_of(point(noisy, noisy[::-1]), point(noisy, noisy[::-1])).verdict, CONFIRMED
        )
        slow = point(noisy, noisy[::-1], (0.0, 0.2))  # a fifth of the step, drowned in the blocks
        self.assertIsNone(verdicts.judge(verdicts.by_blocks(slow, MUON), 0.98))
        self.assertEqual(throughput_of(slow, slow).verdict, REFUTED)
        unsteady = point(noisy, noisy[::-1])
        verdicts.contender(unsteady, MUON)["optimizer_seconds"] = [0.0, 0.3, 0.0, 0.3, 0.01]
        self.assertEqual(throughput_of(unsteady, unsteady).verdict, UNMEASURED)

    def test_blocks_do_not_count_beside_other_work(self):
        # Muon is faster by luck in every block, and slower by its own time.
        adamw = [2.0, 1.8, 2.1, 1.9, 2.2]
        lucky = point(adamw, [0.5 * seconds for seconds in adamw], (0.0, 0.2), device="CPU, 2 threads")
        self.assertEqual(verdicts.judge_point(lucky, MUON, 0.98)[0], CONFIRMED)
        # The same luck on a machine that is quiet by what it sees, and unsteady.
        unsteady = point(adamw, [1.0, 1.1, 1.0, 1.2, 1.1], (0.0, 0.2), device="CPU, 2 threads")
        self.assertEqual(verdicts.judge_point(unsteady, MUON, 0.98)[0], REFUTED)
        lucky["cores_of_other_processes"] = 1.0
        self.assertEqual(verdicts.judge_point(lucky, MUON, 0.98)[0], REFUTED)

    def test_nothing_is_confirmed_by_nothing(self):
        self.assertEqual(throughput_of(None, None).verdict, UNMEASURED)
        self.assertEqual(throughput_of({"failed": "no memory"}, {"failed": "no memory"}).verdict, UNMEASURED)
        self.assertEqual(
            throughput_of(point(self.steady, self.steady), {"failed": "no memory"}).verdict, UNMEASURED
        )


def run(name, losses, command="train_gpt --lr 1 ", final=None):
    validation = [[8 * i, loss, float(i)] for i, loss in enumerate(losses)]
    return {
        "validation": validation,
        "final": final or losses[-1],
        "command": command + CONTENDERS[name],
        "skipped": 0,
        "peak_bytes": 10,
        "tokens_per_second": 1,
        "optimizer_ms": 1,
    }


class Trained(unittest.TestCase):
    def setUp(self):
        self.size = copy.deepcopy(SIZES["quick"])
        self.size.learning_rates, self.size.steps = [1.0, 2.0], 32
        self.runs = {}
        for seed in self.size.seeds:
            for rate, worse in ((1.0, 0.0), (2.0, 1.0)):
                self.put(ADAMW, rate, seed, [5.0, 4.0, 3.5, 3.2, 3.0 + worse + 0.01 * seed])
                self.put(MUON, rate, seed, [5.0, 3.6, 3.1, 2.9, 2.8 + worse + 0.01 * seed])

    def put(self, name, rate, seed, losses, **more):
        self.runs[f"run/{name}/lr {rate:g}/seed {seed}/steps 32/fp32/state fp32"] = run(name, losses, **more)

    def results(self):
        return Numbers(self.runs)

    def test_best_rate_and_steps_to_the_loss(self):
        self.assertEqual(verdicts.best_rate(self.size, self.results(), ADAMW), 1.0)
        # AdamW's mean final loss is 3.02; Muon passes it 0.4 of the way from step 16 (3.1) to step 24 (2.9).
        self.assertAlmostEqual(verdicts.steps_ratio(self.size, self.results()), (16 + 0.4 * 8) / 32)
        self.assertIsNone(verdicts.steps_to([[0, 5.0], [8, 4.0]], 3.0))

    def test_all_seeds_must_agree(self):
        self.assertEqual(verdicts.convergence(self.size, self.results()).verdict, CONFIRMED)
        self.put(MUON, 1.0, 2, [5.0, 3.6, 3.1, 2.9, 3.3])
        self.assertEqual(verdicts.convergence(self.size, self.results()).verdict, UNMEASURED)
        for seed in (1, 3):
            self.put(MUON, 1.0, seed, [5.0, 3.6, 3.1, 2.9, 3.3])
        self.assertEqual(verdicts.convergence(self.size, self.results()).verdict, REFUTED)

    def test_a_second_option_is_not_one_line(self):
        self.assertEqual(verdicts.one_line(self.size, self.results()).verdict, CONFIRMED)
        for seed in self.size.seeds:
            self.put(MUON, 1.0, seed, [5.0, 2.8], command="train_gpt --lr 2 ")
        self.assertEqual(verdicts.one_line(self.size, self.results()).verdict, REFUTED)

    def test_a_failed_run_is_left_out(self):
        self.runs[f"run/{ADAMW}/lr 1/seed 1/steps 32/fp32/state fp32"] = {"failed": "not finite"}
        self.assertEqual(verdicts.best_rate(self.size, self.results(), ADAMW), 2.0)

    def test_precision_within_half_a_per_cent_or_the_spread_of_the_seeds(self):
        for name in (ADAMW, MUON):
            for dtype, off in (("fp32", 0.0), ("bf16", 0.005), ("fp16", 0.0)):
                for seed, final in zip(self.size.seeds, (3.0, 3.01, 3.02)):
                    key = f"run/{name}/lr 1/seed {seed}/steps {self.size.precision_steps}/{dtype}/state fp32"
                    self.runs[key] = run(name, [5.0], final=final + off)
        # Two standard deviations of 3.00, 3.01, 3.02 are 0.02.
        self.assertEqual(verdicts.precision(self.size, self.results()).verdict, CONFIRMED)
        for seed in self.size.seeds:
            self.runs[f"run/{MUON}/lr 1/seed {seed}/steps {self.size.precision_steps}/bf16/state fp32"][
                "final"
            ] += 0.03
        self.assertEqual(verdicts.precision(self.size, self.results()).verdict, REFUTED)
        # The same difference, where the seeds themselves are further apart.
        for name in (ADAMW, MUON):
            for dtype in ("fp32", "bf16", "fp16"):
                steps = self.size.precision_steps
                self.runs[f"run/{name}/lr 1/seed 1/steps {steps}/{dtype}/state fp32"]["final"] -= 0.2
        self.assertEqual(verdicts.precision(self.size, self.results()).verdict, UNMEASURED)


class Bits(unittest.TestCase):
    def test_one_bit_refutes_and_what_failed_is_named(self):
        first = {"losses": [3.0, 2.0], "weights": "ab"}
        ways = {"first": first, "again": copy.deepcopy(first), "4 ranks": {"failed": "one GPU"}}
        found = {f"bits/{name}": {"ways": copy.deepcopy(ways), "traffic": {}} for name in (ADAMW, MUON)}
        size = SIZES["quick"]
        verdict = verdicts.reproducibility(size, Numbers(found))
        self.assertEqual(verdict.verdict, CONFIRMED)
        self.assertIn("4 ranks", verdict.note)
        found[f"bits/{MUON}"]["ways"]["again"]["losses"][1] = 2.0000000000000004
        self.assertEqual(verdicts.reproducibility(size, Numbers(found)).verdict, REFUTED)


class Adaptive(unittest.TestCase):
    def losses(self, adapted):
        """Muon's final losses by seed and shock, without --lr-adapt and with it."""
        size, found = SIZES["quick"], {}
        for i, seed in enumerate(size.seeds):
            for adapt in (False, True):
                key = verdicts.shock_key(size.learning_rates[0], seed, adapt)
                found[key] = {"losses": {"undisturbed": 3.0 + 0.01 * i, "random tokens": 3.2 + 0.01 * i}}
                for shock, difference in adapted.items() if adapt else ():
                    found[key]["losses"][shock] += difference
        return verdicts.adaptive(size, Numbers(found)).verdict

    def test_no_worse_undisturbed_and_better_under_every_shock(self):
        self.assertEqual(self.losses({"undisturbed": 0.005, "random tokens": -0.05}), CONFIRMED)
        self.assertEqual(self.losses({"undisturbed": 0.02, "random tokens": -0.05}), REFUTED)
        self.assertEqual(self.losses({"undisturbed": -0.005, "random tokens": 0.001}), REFUTED)
        self.assertEqual(self.losses({}), UNMEASURED)
        self.assertEqual(verdicts.adaptive(SIZES["quick"], Numbers({})).verdict, UNMEASURED)


def reproduce(*options):
    return subprocess.run(
        [sys.executable, "scripts/reproduce", *options, "--programs", PROGRAMS],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )


class EndToEnd(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.out = Path(cls.folder.name) / "healthy"
        cls.first = reproduce("--size", "smoke", "--out", str(cls.out))
        assert cls.first.returncode == 0, cls.first.stderr
        cls.results = json.loads((cls.out / "results.json").read_text())
        cls.verdicts = {row["key"]: row for row in cls.results["verdicts"]}

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_every_measurement_succeeded_and_is_sane(self):
        for key, value in self.results["measurements"].items():
            self.assertNotIn("failed", value, key)
        size = SIZES["smoke"]
        for key, value in self.results["measurements"].items():
            if key.startswith("throughput/"):
                # Tokens a step, from GPT-2's formulas: a layer's dense Newton-Schulz is 300 C^3, q, k, v
                # apart.
                dense = 2 * 300 * 64**3
                self.assertAlmostEqual(value["dense_newton_schulz_flops"], dense, delta=1)
                share = dense / (value["flops_per_token"] * value["tokens_per_step"])
                self.assertAlmostEqual(share * value["difficulty"], 0.05, delta=0.007)
                self.assertEqual(value["tokens_per_step"] % (16 * 64), 0)
                for contender in value["contenders"]:
                    self.assertEqual(
                        len(contender["seconds"]), dict(size.throughput[0].points)[value["difficulty"]]
                    )
                    self.assertGreaterEqual(len(contender["seconds"]), 5)
                    for whole, part in zip(contender["seconds"], contender["optimizer_seconds"]):
                        self.assertTrue(0 < part < whole)
            if key.startswith("run/"):
                self.assertTrue(2.0 < value["final"] < 5.7, key)  # ln 257 = 5.55
                self.assertEqual(value["skipped"], 0)

    def test_the_plan_is_what_was_allocated(self):
        runs = [
            (key.split("/")[1], value)
            for key, value in self.results["measurements"].items()
            if key.startswith("run/") and key.endswith("steps 8/fp32/state fp32")
        ]
        for name, value in runs:
            plan = self.results["measurements"]["memory/plans"][f"trained/{name}"]
            self.assertEqual(plan["optimizer_state_bytes"], value["optimizer_state_bytes"])
            self.assertLess(plan["all_bytes"], value["peak_bytes"])
        # GPT-2 124M's AdamW: two fp32 moments of 124,475,904 numbers, padding of the vocabulary included.
        plan = self.results["measurements"]["memory/plans"]["d12/AdamW/fp32/state fp32/recompute none"]
        self.assertEqual(plan["optimizer_state_bytes"], 2 * 4 * 124475904)

    def test_verdicts_that_do_not_depend_on_speed(self):
        self.assertEqual(self.verdicts["reproducibility"]["verdict"], CONFIRMED)
        self.assertEqual(self.verdicts["reproducibility"]["note"], "")
        self.assertEqual(self.verdicts["state"]["verdict"], REFUTED)
        self.assertIn("-34.1 % (124M)", self.verdicts["state"]["measured"])
        self.assertIn("-51.2 to -71.0 %", self.verdicts["state"]["note"])
        self.assertEqual(self.verdicts["traffic a step"]["verdict"], REFUTED)

    def test_a_handicapped_muon_is_refuted(self):
        self.assertNotEqual(self.verdicts["throughput"]["verdict"], REFUTED, self.verdicts["throughput"])
        out = Path(self.folder.name) / "handicapped"
        done = reproduce(
            "--size",
            "smoke",
            "--only",
            "throughput",
            "--out",
            str(out),
            "--throughput-program",
            f"{PROGRAMS}/bench_handicapped",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        row = json.loads((out / "results.json").read_text())["verdicts"][0]
        self.assertEqual((row["key"], row["verdict"]), ("throughput", REFUTED), row)

    def test_what_is_done_is_not_repeated_and_what_is_missing_is(self):
        path = self.out / "results.json"
        missing = f"run/{MUON}/lr {SIZES['smoke'].learning_rates[0]:g}/seed 1/steps 8/fp32/state fp32"
        data = json.loads(path.read_text())
        before = data["measurements"].pop(missing)
        path.write_text(json.dumps(data))
        again = reproduce("--size", "smoke", "--out", str(self.out))
        lines = [line for line in again.stdout.splitlines() if re.match(r"\[ *\d+ s\]", line)]
        self.assertEqual(len(lines), 1, again.stdout)
        self.assertIn(missing, lines[0])
        after = json.loads(path.read_text())["measurements"]
        self.assertEqual(after[missing]["final"], before["final"])
        self.assertEqual(set(after), set(self.results["measurements"]))
        other = reproduce("--size", "quick", "--out", str(self.out))
        self.assertEqual(other.returncode, 1)
        self.assertIn("holds size smoke", other.stderr)

    def test_the_page_is_complete_and_needs_nothing_else(self):
        text = (self.out / "report.html").read_text()
        self.assertNotRegex(text, r"(src|href)=|url\(|@import|<script")
        drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
        self.assertGreaterEqual(len(drawings), 8)
        for drawing in drawings:
            self.assertNotIn("nan", drawing)
            width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', drawing).groups())
            for element in ElementTree.fromstring(drawing).iter():
                for name in ("x", "x1", "x2", "cx"):
                    self.assertTrue(0 <= float(element.get(name, 0)) <= width)
                for name in ("y", "y1", "y2", "cy"):
                    self.assertTrue(0 <= float(element.get(name, 0)) <= height)
        table = text[text.index("<tbody>") : text.index("</tbody>")]
        self.assertEqual(len(re.findall(r"<tr>", table)), len(self.verdicts))
        markdown = (self.out / "report.md").read_text()
        for row in self.verdicts.values():
            self.assertIn(row["verdict"], table)
            self.assertIn(row["measured"], markdown)

    def test_the_readme_section_is_made_of_the_numbers(self):
        path = Path(self.folder.name) / "README.md"
        path.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
        for _ in range(2):  # a second time changes nothing
            readme.write(str(self.out / "results.json"), str(path))
        text = path.read_text()
        self.assertNotIn("old", text)
        self.assertTrue(text.startswith("before\n") and text.endswith("\nafter\n"))
        self.assertIn(
            page.claim_table(verdicts.judge_all(SIZES["smoke"], Results.of_file(self.out / "results.json"))),
            text,
        )


if __name__ == "__main__":
    unittest.main()
