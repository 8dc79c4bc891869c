"""Times `ringlab check`: both tiers on correct rings, and the time to the first fault on wrong rings."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringlab.bench.answers import CALL
from ringlab.bench.device import machine
from ringlab.conformance.mutants import MUTANTS
from ringlab.errors import RinglabError

RIGHT = ("ringlab.attention:ring_attention", "ringlab.conformance.plain_distributed:attend")
TIERS = {"quick": ("--quick",), "full": ()}
FIRST_FAULT = ("--quick", "--fail-fast")


def bench_check(
    wrong: int = 15, right: Sequence[str] = RIGHT, progress: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return the seconds that `ringlab check` takes, from the start of its process to its end.

    right: targets over ringlab's Comm and over torch.distributed. wrong: the largest number of wrong rings,
    at least 1, that are checked until their first fault. They are spread evenly over the suite's own wrong
    rings.
    Raises: RinglabError if a right ring fails, or a wrong one passes.
    """
    cases = []
    for target in right:
        for tier, options in TIERS.items():
            seconds, report = _checked(target, options, ok=True)
            case = {"target": target, "tier": tier, "seconds": seconds, "checks": len(report["checks"])}
            cases.append(case | {"ok": True})
            progress()
    found = {}
    for name in sorted(MUTANTS)[:: -(-len(MUTANTS) // wrong)]:
        found[name], _ = _checked(f"ringlab.conformance.mutants:{name}", FIRST_FAULT, ok=False)
        progress()
    median = round(statistics.median(found.values()), 1)
    first = {"options": " ".join(FIRST_FAULT), "seconds": found, "median_s": median}
    return {"ok": True, "cases": cases, "wrong": first, "machine": machine()}


def _checked(target: str, options: Sequence[str], ok: bool) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-c", CALL, "check", target, *options, "--json"]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = round(time.perf_counter() - begin, 1)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        report = {"ok": None, "first": done.stderr.strip()[-300:]}
    loads = bool(report.get("checks")) and report["checks"][0]["ok"]
    if report.get("ok") is not ok or not loads or done.returncode != (0 if ok else 1):
        needed = f"a {'right' if ok else 'wrong'} ring that {'passes' if ok else 'fails'}"
        raise RinglabError(needed, f"{target}: {report.get('error') or report.get('first')}")
    return seconds, report
