"""The time of an answer of the command line: whole processes, imports included."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringlab.bench.device import machine
from ringlab.errors import RinglabError

CALL = "import sys; from ringlab.cli import main; sys.exit(main())"
PLAN = ("plan", "--model", "llama3-70b", "--tokens", "1M", "--hardware", "h100", "--nodes", "4", "--json")


def bench_answers(
    runs: int = 11, arguments: Sequence[str] = PLAN, progress: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return the wall seconds of `runs` calls of `ringlab` with `arguments`, --json among them, each its own process.

    An additional first call, which loads the files into the machine's cache, is not counted.
    "It does not fit", status 1, counts as an answer. Raises: RinglabError if a call gives none.
    """
    seconds = []
    for _ in range(runs + 1):
        seconds.append(_answered(arguments))
        progress()
    counted = seconds[1:]
    return {
        "ok": True,
        "command": ["ringlab", *arguments],
        "wall_s": counted,
        "median_s": statistics.median(counted),
        "slowest_s": max(counted),
        "machine": machine(),
    }


def _answered(arguments: Sequence[str]) -> float:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", CALL, *arguments], capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {"error": done.stderr.strip()[-300:]}
    if "error" in answer or done.returncode not in (0, 1):
        raise RinglabError(
            f"an answer of ringlab {' '.join(arguments)}", f"status {done.returncode}: {answer.get('error')}"
        )
    return seconds
