"""The fuzzer in several processes side by side, each watched from outside."""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from typing import Any

from tests.fuzz.engine import HANG_S, Finding, Fuzzed, fuzz

STUCK_S = 6 * HANG_S


def fuzz_beside(target: str, seed: int, inputs: int, processes: int) -> Fuzzed:
    """Return what came of `inputs` inputs, dealt to as many processes; one that is stuck or dies is a finding."""
    spawn = multiprocessing.get_context("spawn")
    total, running = Fuzzed(), []
    for number in range(processes):
        ours, theirs = spawn.Pipe()
        at = spawn.Value("q", -1, lock=False)
        process = spawn.Process(
            target=_serve, args=(theirs, at, target, seed, number, inputs, processes), daemon=True
        )
        process.start()
        theirs.close()
        running.append((process, ours, at))
    for process, ours, at in running:
        part = _waited_for(ours, at)
        process.kill()
        process.join()
        total.inputs += part.inputs
        total.outcomes += part.outcomes
        total.findings += part.findings
        total.seconds = max(total.seconds, part.seconds)
    return total


def _serve(pipe: Any, at: Any, target: str, seed: int, first: int, inputs: int, step: int) -> None:
    pipe.send(fuzz(target, seed, range(first, inputs, step), begun=partial(setattr, at, "value")))


def _waited_for(pipe: Any, at: Any) -> Fuzzed:
    """Return what a process says; where its input does not move on, that input is the finding."""
    before, since = at.value, time.monotonic()
    try:
        while not pipe.poll(1.0):
            if at.value != before:
                before, since = at.value, time.monotonic()
            elif before >= 0 and time.monotonic() - since > STUCK_S:
                return Fuzzed(findings=[Finding(before, "hangs where no signal reaches it", "", "")])
        found: Fuzzed = pipe.recv()
    except (EOFError, OSError):
        return Fuzzed(findings=[Finding(at.value, "ended its process", "", "")])
    return found
