"""Measure how long a person waits: `python tools/goal_times.py [notebooks | tiers | tests]`, on a quiet machine.

Writes files in benchmarks/results/waiting: notebooks.json, each lesson from its first cell to its last in a fresh
kernel; tiers.json, `ringlab check` from the start of its process to its end; tests.json, `make test` in a fresh clone
of the last commit, set-up included. Tests hold the first two to their goals; `make house` lists the third.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat

from ringlab.bench.device import machine
from ringlab_course.builder.execution import execute

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks/results/waiting"
TARGETS = ("ringlab.attention:ring_attention", "ringlab.conformance.plain_distributed:attend")


def notebooks() -> dict[str, Any]:
    """Return the seconds of each lesson; those that were measured stay, unless RINGLAB_LESSONS=14,15 names them."""
    before = RESULTS / "notebooks.json"
    wanted = tuple(filter(None, os.environ.get("RINGLAB_LESSONS", "").split(",")))
    seconds = json.loads(before.read_text(encoding="utf-8"))["seconds"] if wanted else {}
    for path in sorted((CHECKOUT / "notebooks").glob("*.ipynb")):
        if wanted and not path.name.startswith(wanted):
            continue
        notebook = nbformat.read(path, as_version=4)
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        seconds[path.stem] = round(time.perf_counter() - begin, 1)
        print(path.stem, seconds[path.stem], flush=True)
    return {"seconds": seconds}


def tiers() -> dict[str, Any]:
    """Return the seconds of both tiers for a target over ringlab's Comm and one over torch.distributed, and what they said."""
    cases = []
    for target in TARGETS:
        for tier, options in (("quick", ["--quick"]), ("full", [])):
            command = [sys.executable, "-m", "ringlab", "check", target, *options, "--json"]
            begin = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT)
            took = round(time.perf_counter() - begin, 1)
            report = json.loads(done.stdout)
            case = {
                "target": target,
                "tier": tier,
                "seconds": took,
                "checks": len(report["checks"]),
                "ok": report["ok"],
            }
            cases.append(case)
            print(case, flush=True)
    return {"cases": cases}


def tests() -> dict[str, Any]:
    """Return the seconds of `make test`, its number of passed tests, and the most bytes that a process of it held."""
    with tempfile.TemporaryDirectory(prefix="make test ") as folder:
        clone = Path(folder) / "ringlab"
        subprocess.run(["git", "clone", "-q", CHECKOUT, clone], check=True)
        begin = time.perf_counter()
        done = subprocess.run(["make", "test"], cwd=clone, capture_output=True, text=True)
        took = round(time.perf_counter() - begin)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-1000:])
    passed = sum(map(int, re.findall(r"(\d+) passed.* in ", done.stdout)))
    peaks = re.findall(r"^peak of memory of any process: (.*)$", done.stdout, re.MULTILINE)
    most = max(map(float, re.findall(r"([\d.]+) GB", " ".join(peaks))))
    return {"seconds": took, "passed": passed, "peak_gb": most}


if __name__ == "__main__":
    for name in sys.argv[1:] or ("notebooks", "tiers", "tests"):
        found = {"notebooks": notebooks, "tiers": tiers, "tests": tests}[name]()
        RESULTS.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**found, "machine": machine()}, indent=1, ensure_ascii=False)
        (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
