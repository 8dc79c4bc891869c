"""The messages of each device in a compiled program, read off XLA's text of it. No JAX is needed.

A computation is called by others: a loop's body as often as the loop turns, a branch only where its
condition holds. So messages are counted from the entry down, each as often as its computation is run.
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
    """The text is not written as XLA wrote programs when this module was."""


@dataclass
class Traffic:
    """Messages and elements sent by the busiest device; self-sends excluded.

    others: other collectives, by name, each as often as it stands there. in_branch: whether a message
    stands in a branch, so that some devices may wait for others that do not send. turns_unknown:
    whether one stands in a loop of which the compiler does not know how often it turns. loops: the elements
    that a device sends in one turn, and the turns, of each loop with a message whose turns are known.
    """

    sent: Counter[int] = field(default_factory=Counter)
    elements_sent: Counter[int] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    in_branch: bool = False
    turns_unknown: bool = False
    loops: list[tuple[int, int]] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """Messages of the device that sends most."""
        return max(self.sent.values(), default=0)

    @property
    def elements(self) -> int:
        """Array elements that the device sends which sends most."""
        return max(self.elements_sent.values(), default=0)


def traffic(text: str) -> Traffic:
    """Return what a compiled program sends; `text` is what `compiled.as_text()` returns.

    Raises: UnknownForm, so that nothing counts as not sent because it could not be read.
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
    """The lines of each computation by its name, and the entry's name."""
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
    """Add to `found` what the computation `name` sends when it is run `times` times; 0 stands for not known."""
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
    """Return the elements that a device sends while a loop's body is run once."""
    once = Traffic()
    _walk(computations, body, 1, False, once)
    return once.elements


def _add(found: Traffic, shapes: str, pairs: str, times: int) -> None:
    """Count one message, or several tensors in one, for each device that sends it to another."""
    sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in _SHAPE.findall(shapes)]
    for source, target in re.findall(r"\{(\d+),(\d+)\}", pairs):
        if source != target:
            found.sent[int(source)] += times * len(sizes)
            found.elements_sent[int(source)] += times * sum(sizes)
