"""The time of an answer of the command line: whole processes, imports included, and the memory of a large simulation."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ringlab.bench.device import machine
from ringlab.errors import RinglabError

CALL = "import sys; from ringlab.cli import main; sys.exit(main())"
PLAN = ("plan", "--model", "llama3-70b", "--tokens", "1M", "--hardware", "h100", "--nodes", "4", "--json")
HELP = ("--help",)
SIMULATE = tuple(
    ("simulate", "--tokens", "16Mi", "--ranks", ranks, "--layout", "zigzag", "--json")
    for ranks in ("1024", "8192")
)
QUICK_ANSWERS = (PLAN, HELP)


def bench_answers(
    runs: int = 11,
    commands: Sequence[Sequence[str]] = QUICK_ANSWERS,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Return the wall seconds of `runs` calls of `ringlab` with each of these arguments, each its own process.

    An additional first call of each, which loads the files into the machine's cache, is not counted. The commands take turns.
    "It does not fit", status 1, counts as an answer. Raises: RinglabError if a call gives none.
    """
    seconds: dict[str, list[float]] = {_words(command): [] for command in commands}
    for _ in range(runs + 1):
        for command in commands:
            seconds[_words(command)].append(_answered(command)[0])
            progress()
    cases = [
        {
            "command": command,
            "wall_s": times[1:],
            "median_s": statistics.median(times[1:]),
            "slowest_s": max(times[1:]),
        }
        for command, times in seconds.items()
    ]
    return {"ok": True, "cases": cases, "machine": machine()}


def bench_simulator(commands: Sequence[Sequence[str]] = SIMULATE) -> dict[str, Any]:
    """Return what `ringlab simulate` answers to each command, with the CPU seconds and the most bytes in memory of its process.

    Raises: RinglabError if it gives no answer.
    """
    cases = []
    for arguments in commands:
        seconds, answer, used = _answered(arguments)
        measured = {
            "process_wall_s": seconds,
            "process_cpu_s": used["cpu_s"],
            "peak_rss_bytes": used["peak_rss_bytes"],
        }
        cases.append({**answer, "measured": measured})
    return {"ok": True, "cases": cases, "machine": machine()}


def _words(arguments: Sequence[str]) -> str:
    return " ".join(("ringlab", *arguments))


def _answered(arguments: Sequence[str]) -> tuple[float, dict[str, Any], dict[str, float]]:
    """The wall seconds of one call, its JSON if that was asked for, and the resources that its process used."""
    command = [sys.executable, "-I", "-S", "-c", _WATCH, sys.executable, "-c", CALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    *said, used = done.stderr.splitlines() or [""]
    try:
        answer = json.loads(done.stdout) if "--json" in arguments else {}
    except ValueError:
        answer = {"error": "\n".join(said)[-300:]}
    if "error" in answer or done.returncode not in (0, 1):
        why = f"status {done.returncode}: {answer.get('error') or ' '.join(said)[-300:]}"
        raise RinglabError(f"an answer of {_words(arguments)}", why)
    resources = json.loads(used)
    return resources["wall_s"], answer, resources


# A process of its own, and a small one: the most memory of a child counts what its parent held when it was started.
_WATCH = """
import json, os, sys, time
begin = time.perf_counter()
_, status, used = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)
used = {
    "wall_s": time.perf_counter() - begin,
    "cpu_s": used.ru_utime + used.ru_stime,
    "peak_rss_bytes": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
}
print("", json.dumps(used), sep="\\n", file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""
