"""What the suite is worth, as figures: which check finds which wrong ring, and that right ones pass many seeds.

`python -m ringlab.conformance.evidence matrix FILE` writes the kill matrix, `… seeds FILE` the sweep over seeds.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ringlab.conformance import checks
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.runner import Report, check

SEEDS = 50
RIGHT = ("ringlab.attention:ring_attention", "ringlab.conformance.plain_ring:attend")
_HEAD = """# Which check finds which wrong ring

Written by `python -m ringlab.conformance.evidence matrix docs/conformance-matrix.md`. Every wrong ring is the plain
ring of `ringlab.conformance.plain_ring`, changed in one place, and claims what that one claims. A cell has ● where the
quick tier's check of that column fails, ◉ where that check is named for it. The plain ring itself passes all of them.
"""


def matrix(reports: dict[str, Report]) -> str:
    """Return the kill matrix as Markdown: a row for each wrong ring, a column for each check that found any."""
    columns = [each.name for each in checks.CHECKS if any(each.name in r.failed for r in reports.values())]
    lines = [_HEAD, "| wrong ring | what is wrong | " + " | ".join(columns) + " |"]
    lines.append("|---" * (2 + len(columns)) + "|")
    for name, report in reports.items():
        mutant = MUTANTS[name]
        cells = [
            "" if column not in report.failed else "◉" if column == mutant.found_by else "●"
            for column in columns
        ]
        lines.append(
            f"| `{name}` | {mutant.kind}: {mutant.fault.replace('|', chr(92) + '|')} | "
            + " | ".join(cells)
            + " |"
        )
    found = sum(MUTANTS[name].found_by in report.failed for name, report in reports.items())
    lines.append(f"\n{found} of {len(reports)} wrong rings are found by the check that is named for them.")
    return "\n".join(lines) + "\n"


def sweep(target: str, seeds: int = SEEDS, processes: int = 2) -> dict[str, Any]:
    """Return how many of the seeds 0, 1, … the target passes in the quick tier, and which checks failed where."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        told = pool.map(partial(_failures, target), range(seeds), chunksize=1)
    failed = {str(seed): each for seed, each in enumerate(told) if each}
    return {"target": target, "seeds": seeds, "passed": seeds - len(failed), "failed": failed}


def _failures(target: str, seed: int) -> dict[str, str]:
    """The evidence of each check that fails with this seed."""
    torch.set_num_threads(1)
    report = check(target, quick=True, seed=seed, isolate=False)
    return {each.name: each.evidence for each in report.findings if not each.ok}


def main(what: str, path: Path) -> int:
    """Write the matrix or the sweep to `path`; return 1 where one of them shows that the suite is wrong."""
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "matrix":
        reports = {
            name: check(mutant.target(), quick=True, isolate=False) for name, mutant in MUTANTS.items()
        }
        path.write_text(matrix(reports), encoding="utf-8")
        return 0 if all(MUTANTS[name].found_by in report.failed for name, report in reports.items()) else 1
    found = [sweep(target) for target in RIGHT]
    about = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    path.write_text(
        json.dumps({**about, "tier": "quick", "sweeps": found}, indent=2) + "\n", encoding="utf-8"
    )
    return 0 if all(each["passed"] == each["seeds"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
