"""The strength of the suite in figures: which check finds which wrong ring, and how often right rings pass.

`python -m tools.conformance.evidence matrix FILE` writes the kill matrix. `… seeds FILE` checks ringlab's own
ring and the plain ring with many seeds and writes the results. `… styles FILE` does the same for correct
rings in other styles. With names after the file (`… matrix FILE no_scale "two groups"`), only the rows of these
wrong rings and the columns of these checks are computed again, and the rest of FILE is kept.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringlab.conformance import checks
from ringlab.conformance.checks.faults import FAULT_CHECKS
from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.checks.resources import RESOURCE_CHECKS
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.report.findings import Finding
from ringlab.conformance.run.run import Run
from ringlab.conformance.run.virtual import on_virtual_ranks
from ringlab.conformance.styles import STYLES
from ringlab.conformance.suite import check
from ringlab.conformance.target.claims import Target
from tools.conformance import matrix_page
from tools.conformance.matrix_page import SEEDS, Row

RIGHT = {
    "seeds": ("ringlab.attention:ring_attention", "ringlab.plain_ring:attend"),
    "styles": tuple(f"ringlab.conformance.styles:{name}" for name in STYLES),
}
"""The right rings of each sweep."""
QUICK = tuple(each.name for each in checks.CHECKS if each.tier == "quick")
_FIXED = {"types", "many calls", "side effects", "determinism", "inputs kept", "aliasing", "two layers"}
_FIXED |= {each.name for each in (*RESOURCE_CHECKS, *FAULT_CHECKS)}
ASKED = {"seeds": QUICK, "styles": tuple(name for name in QUICK if name not in _FIXED)}
"""The checks of each sweep.

Ten styles run only the checks whose result depends on the seed; a test runs the other checks once.
"""
LOOSE = 1e-2
_MANY = 8
"""The number of rows from which two processes save time."""
_CLOSEST = re.compile(r"closest to its bound: \w+ error (\S+) within (\S+)")


@dataclass(frozen=True)
class Loose:
    """A test as most rings have it: only out is compared, by `allclose` with 1e-2, on one number of ranks."""

    causal: bool
    layouts: tuple[str, ...]

    def passed_by(self, target: Target) -> bool:
        """Return whether the target passes this test."""
        return all(self._close(target, layout) for layout in self.layouts)

    def _close(self, target: Target, layout: str) -> bool:
        run = Run(4, 64, layout, self.causal, H=2, K=2, D=32, backward=False)
        ran = on_virtual_ranks(target, run)
        right = expected(run.plain)[0].out
        return ran.trouble is None and np.allclose(ran.arrays["out"], right, rtol=LOOSE, atol=LOOSE)


LOOSE_TESTS = (Loose(False, ("contiguous",)), Loose(True, ("contiguous", "zigzag")))


def row(target: Target) -> Row:
    """Return the checks of the quick tier that a target fails, and the number of loose tests that it passes."""
    names = [each.name for each in checks.CHECKS]
    report = check(target, quick=True, only=names, isolate=False)
    passed = 0
    for test in LOOSE_TESTS:
        if not test.passed_by(target):
            break
        passed += 1
    return Row(tuple(report.failed), passed)


def sweep(
    targets: Sequence[str], asked: Sequence[str], seeds: int, processes: int = 2
) -> list[dict[str, Any]]:
    """Return, for each target, how many of the seeds 0, 1, … it passes, and which checks failed.

    closest: the largest ratio of an error to its bound in a check that passes, over all seeds.
    """
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.map(partial(_with_seed, targets, asked), range(seeds), chunksize=1)
    return [_swept(target, [by_target[target] for by_target in found]) for target in targets]


def _swept(target: str, found: Sequence[tuple[dict[str, str], float]]) -> dict[str, Any]:
    failed = {str(seed): failures for seed, (failures, _) in enumerate(found) if failures}
    closest = round(max(share for _, share in found), 2)
    return {
        "target": target,
        "seeds": len(found),
        "passed": len(found) - len(failed),
        "failed": failed,
        "closest": closest,
    }


def _with_seed(
    targets: Sequence[str], asked: Sequence[str], seed: int
) -> dict[str, tuple[dict[str, str], float]]:
    """Return, for each target, the evidence of checks that fail with this seed, and the largest error ratio.

    The ratio is that of an error to its bound. One process checks all targets, because the truth of their
    runs is the same.
    """
    torch.set_num_threads(1)
    found = {}
    for target in targets:
        report = check(target, quick=True, only=asked, seed=seed, isolate=False)
        failures = {each.name: each.evidence for each in report.findings if not each.ok}
        found[target] = failures, max(map(_share, report.findings), default=0.0)
    return found


def _share(finding: Finding) -> float:
    """Return the largest ratio of an error to its bound, read from the digits in the evidence."""
    found = _CLOSEST.search(finding.evidence)
    return float(found[1]) / float(found[2]) if found and float(found[2]) else 0.0


def rows(path: Path, names: Sequence[str] = ()) -> Mapping[str, Row]:
    """Return a row for each wrong ring.

    If `names` are given, only their rows and columns are computed, and all others are read from `path`.
    Raises: SystemExit for an unknown name.
    """
    unknown = [name for name in names if name not in MUTANTS and name not in checks.names()]
    if unknown:
        raise SystemExit(
            f"needed wrong rings of ringlab.conformance.mutants or checks, got {', '.join(unknown)}"
        )
    kept = matrix_page.read(path.read_text(encoding="utf-8")) if names else {}
    columns = tuple(name for name in checks.names() if name in names)
    todo: dict[str, Row | None] = {name: None for name in MUTANTS if name in names or name not in kept}
    if columns:
        todo = {name: None if name in todo else kept[name] for name in MUTANTS}
    if len(todo) < _MANY:
        made = [_row_of(name, old, columns) for name, old in todo.items()]
    else:
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            made = pool.starmap(_row_of, [(name, old, columns) for name, old in todo.items()], chunksize=1)
    new = dict(zip(todo, made, strict=True))
    return {name: new[name] if name in new else kept[name] for name in MUTANTS}


def _row_of(name: str, old: Row | None, columns: Sequence[str]) -> Row:
    """Return the row of a wrong ring: a new one, or the old one with `columns` computed again."""
    torch.set_num_threads(1)
    target = MUTANTS[name].target()
    if old is None:
        return row(target)
    failed = {*old.failed} - {*columns} | {*check(target, quick=True, only=columns, isolate=False).failed}
    return Row(tuple(each for each in checks.names() if each in failed), old.loose)


def main(what: str, path: Path, names: Sequence[str] = ()) -> int:
    """Write the matrix or a sweep to `path`; return 1 if it shows a mistake of the suite."""
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "matrix":
        found = rows(path, names)
        path.write_text(matrix_page.page(found), encoding="utf-8")
        return 0 if all(MUTANTS[name].found_by in each.failed for name, each in found.items()) else 1
    about = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "tier": "quick",
        "checks": list(ASKED[what]),
    }
    sweeps = sweep(RIGHT[what], ASKED[what], SEEDS[what])
    path.write_text(json.dumps({**about, "sweeps": sweeps}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(each["passed"] == each["seeds"] for each in sweeps) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
