"""Measures how long commands of `ringlab` take, imports included, and the memory of a large simulation."""

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
    """Return the wall seconds of `runs` calls of each command of `ringlab`, each in its own process.

    The commands take turns. The first call of each command loads files into the machine's cache and is not
    counted. Exit status 1, "it does not fit", counts as an answer. Raises: RinglabError if a call gives no
    answer.
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
    """Return the answer of `ringlab simulate` to each command, with its process's CPU seconds and memory.

    Raises: RinglabError if a command gives no answer.
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
    """Return one call's wall seconds, its JSON if the command has --json, and its process's resources."""
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


# The command is started from a separate, small process, because a child's peak memory includes the memory
# that its parent had when the child was started.
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
