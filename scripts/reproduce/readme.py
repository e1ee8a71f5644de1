"""The README's claim table, from a results.json."""

import sys
from pathlib import Path

import page
import verdicts
from results import Results
from sizes import SIZES

BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"


def section(results_file):
    results = Results.of_file(results_file)
    size = SIZES[results.data["size"]]
    rows = verdicts.judge_all(size, results)
    notes = "\n".join(f"- **{row.claim}**: {row.note}" for row in rows if row.note)
    waits = (
        ""
        if "cuda backend" in results.data["about"]["program"]
        else "Nothing here has run on a GPU yet: `scripts/reproduce_98.sh` measures the same there.\n\n"
    )
    return (
        f"{page.about_text(results)}\n\n{page.claim_table(rows)}\n{notes}\n\n{waits}Made of "
        f"`{results_file}` by "
        f"`scripts/reproduce_98.sh --readme {results_file} README.md`."
    )


def write(results_file, readme_file):
    readme = Path(readme_file)
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"reproduce_98.sh: {readme_file}: must have the lines {BEGIN} and {END} once")
    before, rest = text.split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{section(results_file)}\n{END}{rest.split(END)[1]}")
