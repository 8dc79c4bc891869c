"""The messages of each device in a compiled program, read from XLA's text of the program. JAX is not needed.

XLA's text consists of computations that call each other: a loop runs its body once per turn, and a branch
runs only if its condition is true. So counting begins at the entry computation, and each message is counted
as often as its computation runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

_BEGIN = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*\{$")
_PERMUTE = re.compile(r"= (.*?) collective-permute(?:-start)?\(.*source_target_pairs=\{(.*?\})\}")
_OTHER = re.compile(r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-broadcast)(?:-start)?\(")
_SENDS = re.compile(r" collective-permute(?:-start)?\(")
_LOOP = re.compile(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)")
_ANY_LOOP = re.compile(r" while\(")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BRANCHES = re.compile(
    r" conditional\(.*(?:branch_computations=\{(.*?)\}|true_computation=(\S+), false_computation=(\S+))"
)
_CALL = re.compile(r" (?:call|async-start)\(.*(?:to_apply|calls|called_computation)=%([\w.-]+)")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


class UnknownForm(Exception):
    """The program's text is not in a form that this module can read."""


@dataclass
class Traffic:
    """The messages and elements that the busiest device sends, without messages of a device to itself.

    others: other collectives by name, each as often as it runs (at least once if the number is unknown).
    in_branch: whether a message is inside a branch, so that some devices may wait for others that do not
    send.
    turns_unknown: whether a message is inside a loop whose number of turns the compiler does not know.
    loops: for each loop with a message and a known number of turns, the elements that a device sends per
    turn, and the turns.
    """

    sent: Counter[int] = field(default_factory=Counter)
    elements_sent: Counter[int] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    in_branch: bool = False
    turns_unknown: bool = False
    loops: list[tuple[int, int]] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """The number of messages of the device that sends the most messages."""
        return max(self.sent.values(), default=0)

    @property
    def elements(self) -> int:
        """The number of array elements of the device that sends the most elements."""
        return max(self.elements_sent.values(), default=0)


def traffic(text: str) -> Traffic:
    """Return the messages of a compiled program; `text` is what `compiled.as_text()` returns.

    Raises: UnknownForm for a text that cannot be read, so that no message is silently left out.
    """
    computations, entry = _computations(text)
    if not entry:
        raise UnknownForm("no entry was found")
    for line in text.splitlines():
        if (_SENDS.search(line) and not _PERMUTE.search(line)) or (
            _ANY_LOOP.search(line) and not _LOOP.search(line)
        ):
            raise UnknownForm(line.strip()[:100])
    found = Traffic()
    _walk(computations, entry, 1, False, found)
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation by name, and the name of the entry computation."""
    found: dict[str, list[str]] = {}
    entry, lines = "", list[str]()
    for line in text.splitlines():
        if begin := _BEGIN.match(line):
            lines = found[begin[2]] = []
            entry = begin[2] if begin[1] else entry
        else:
            lines.append(line)
    return found, entry


def _walk(computations: dict[str, list[str]], name: str, times: int, branch: bool, found: Traffic) -> None:
    """Add the messages of computation `name`, run `times` times, to `found`; 0 means an unknown number."""
    for line in computations.get(name, ()):
        if sends := _PERMUTE.search(line):
            _add(found, sends[1], sends[2], times)
        elif other := _OTHER.search(line):
            found.others[other[1]] += max(times, 1)
        elif loop := _LOOP.search(line):
            known = _TURNS.search(line)
            turns = int(known[1]) if known else 0
            _walk(computations, loop[1], times * (turns + 1) if known else 0, branch, found)
            _walk(computations, loop[2], times * turns, branch, found)
            if known and (in_one := _in_one_turn(computations, loop[2])):
                found.loops.append((in_one, turns))
            continue
        elif fork := _BRANCHES.search(line):
            for called in re.findall(r"%([\w.-]+)", " ".join(filter(None, fork.groups()))):
                _walk(computations, called, times, True, found)
            continue
        elif call := _CALL.search(line):
            _walk(computations, call[1], times, branch, found)
            continue
        else:
            continue
        found.in_branch |= branch
        found.turns_unknown |= times == 0


def _in_one_turn(computations: dict[str, list[str]], body: str) -> int:
    """Return the elements that a device sends during one run of a loop's body."""
    once = Traffic()
    _walk(computations, body, 1, False, once)
    return once.elements


def _add(found: Traffic, shapes: str, pairs: str, times: int) -> None:
    """Count one message per tensor for each device that sends to another device."""
    sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in _SHAPE.findall(shapes)]
    for source, target in re.findall(r"\{(\d+),(\d+)\}", pairs):
        if source != target:
            found.sent[int(source)] += times * len(sizes)
            found.elements_sent[int(source)] += times * sum(sizes)
