"""Runs of a target on the inputs of a seed; input N depends only on the seed and N, so findings repeat.

The fuzzer can run in several processes at once, and the parent notices a process that is stuck or dead.
"""

from __future__ import annotations

import faulthandler
import inspect
import multiprocessing
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ringlab_course.checking import protocol
from ringlab_course.judge import exchanges, submission
from tests.fuzz import frames, notebooks

TARGETS: dict[str, tuple[ModuleType, tuple[ModuleType, ...]]] = {
    "protocol": (frames, (protocol, exchanges)),
    "notebooks": (notebooks, (submission,)),
}
"""For each target: the module that draws and checks inputs, and the modules under test."""
ELSEWHERE = {
    *("pack", "node", "_array", "_layout", "_flags", "_is_tensor", "_dtype", "_tensor_bytes", "_array_bytes"),
    *("_arrays", "nbytes", "event", "done", "_read"),
}
"""Functions in these modules that read no foreign bytes, or read other kinds of files than the inputs."""
HANG_S = 10.0
"""Seconds of processor time, so that a standstill of the machine causes no finding."""
ASLEEP = 12
"""The factor by which the limit is longer in wall-clock time, for inputs that wait without computing."""
MOST_FINDINGS = 20


class Hang(BaseException):
    """The time limit of an input ran out; not an Exception, so that no code takes it for a refusal."""


@dataclass(frozen=True)
class Finding:
    """One input that broke the property: its number, the error, the place, and the input's beginning."""

    number: int
    what: str
    where: str
    input: str


@dataclass
class Fuzzed:
    """The result of a run: how often each outcome occurred, and the findings."""

    inputs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON-able data."""
        return {
            **asdict(self),
            "seconds": round(self.seconds, 1),
            "outcomes": dict(sorted(self.outcomes.items())),
        }


def input_of(target: str, seed: int, number: int) -> Any:
    """Return input `number` of the seed `seed`."""
    return TARGETS[target][0].draw(random.Random((seed << 40) + number))


def fuzz(
    target: str, seed: int, numbers: Iterable[int], *, hang_s: float = HANG_S, enough: int = MOST_FINDINGS,
    begun: Callable[[int], None] = lambda number: None,
) -> Fuzzed:  # fmt: skip
    """Return the result of these inputs; stop after `enough` findings. `begun` is called for each input."""
    module, fuzzed, start = TARGETS[target][0], Fuzzed(), time.monotonic()
    with _watched():
        for number in numbers:
            begun(number)
            drawn = input_of(target, seed, number)
            fuzzed.inputs += 1
            try:
                _alarm(hang_s)
                outcome = module.check(drawn)
                _alarm(0)
                fuzzed.outcomes[outcome] += 1
            except (Exception, Hang) as error:
                _alarm(0)
                fuzzed.findings.append(_finding(number, error, drawn))
                if len(fuzzed.findings) >= enough:
                    break
    fuzzed.seconds = time.monotonic() - start
    return fuzzed


@contextmanager
def _watched() -> Any:
    def stop(*_: Any) -> None:
        raise Hang("not done in time")

    faulthandler.enable()
    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    try:
        yield
    finally:
        _alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _alarm(seconds: float) -> None:
    """Raise Hang after `seconds` of computing, or ASLEEP · `seconds` of waiting; 0 turns the alarm off."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, ASLEEP * seconds)


def _finding(number: int, error: BaseException, drawn: Any) -> Finding:
    last = traceback.extract_tb(error.__traceback__)[-1]
    told = f"{type(error).__name__}: {error}"[:300]
    return Finding(number, told, f"{Path(last.filename).name}:{last.lineno}", repr(drawn)[:500])


def lines_missed(target: str, seed: int, count: int) -> dict[str, list[int]]:
    """Return, by tested module, the lines in functions that the first `count` inputs never reach."""
    module, tested = TARGETS[target]
    names = {each.__file__: each for each in tested}
    reached: dict[str, set[int]] = {name: set() for name in names if name}

    def trace(frame: Any, event: str, _: Any) -> Any:
        lines = reached.get(frame.f_code.co_filename)
        if lines is None:
            return None
        if event == "line":
            lines.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for number in range(count):
            module.check(input_of(target, seed, number))
    finally:
        sys.settrace(before)
    return {Path(name).stem: sorted(_lines_of(name) - lines) for name, lines in reached.items()}


def _lines_of(name: str) -> set[int]:
    """Return the lines of code inside the functions of a file."""
    code = compile(Path(name).read_text(encoding="utf-8"), name, "exec")
    found, todo = set[int](), [(code, False)]
    while todo:
        each, inside = todo.pop()
        if inside:
            found |= {line for _, _, line in each.co_lines() if line and line != each.co_firstlineno}
        inner = [
            const
            for const in each.co_consts
            if isinstance(const, CodeType) and const.co_name not in ELSEWHERE
        ]
        todo += [(const, bool(const.co_flags & inspect.CO_OPTIMIZED)) for const in inner]
    return found


STUCK_S = 6 * HANG_S


def fuzz_beside(target: str, seed: int, inputs: int, processes: int) -> Fuzzed:
    """Return the result of `inputs` inputs on several processes; a stuck or dead process is a finding."""
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
    """Return the result of a process, or a finding if the process stays too long at one input."""
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
