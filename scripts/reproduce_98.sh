#!/usr/bin/env bash
# The claim, end to end: Muon at 98 % of AdamW's throughput with half its optimizer state, less memory and
# traffic, in FP16 and BF16 without tuning, by one option, with the same bits everywhere. Measures each on this
# machine, CPU or GPU, and says confirmed, refuted or not measurable here, whatever comes out.
#
#   scripts/reproduce_98.sh [--quick] [--out DIR]      --help lists the other options
#
# The full size takes up to 2 hours on 2 cores, --quick 6 minutes. Goes on where it was interrupted. Writes
# DIR/report.html, DIR/report.md and DIR/results.json; the default DIR is runs/reproduce_98_<size>.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v python3 >/dev/null || { echo "reproduce_98.sh: needs python3 (3.9 or later, no packages)" >&2; exit 1; }
case " $* " in
    *" --programs "* | *" --programs="* | *" --help "* | *" -h "* | *" --page "* | *" --readme "*) ;;
    *) make -j"$(nproc)" reproduce >/dev/null ;;
esac
exec python3 scripts/reproduce "$@"
