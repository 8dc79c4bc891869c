"""Checks of 15.choose: a report that ranks all schedules for a layer, a context and a machine.

The right answers come from the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ringlab.cost import choose as cost
from ringlab.errors import apart
from ringlab_course.checking.answers import is_close
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import BOUND
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of
from ringlab_course.exercises.e15_choosing.traffic import Layer, shareable, sizes_of

mistake = mistakes_of("15.choose")

NAMES = ("bytes", "exposed_s", "reason", "place")
KEYS = ("schedule", "ulysses", "bytes", "exposed_s", "reason")
CLEAR = 1e-3
"""The least relative difference of compared values, so that no rounding changes an order or a reason."""
HIDDEN, EXPOSED, MEMORY, HEADS = (
    float(cost.REASONS.index(reason)) for reason in ("hidden", "exposed", "memory", "heads")
)
"""The numbers that represent the reasons."""
Machine = dict[str, float]
NONE = -1.0
"""The number that represents None in arrays."""


@dataclass(frozen=True)
class Problem:
    """A layer, S tokens on P ranks, and a machine: flops_per_s, bytes_per_s, latency_s, memory_bytes."""

    layer: Layer
    S: int
    P: int
    machine: Machine

    @property
    def text(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in self.layer.items())
        machine = ", ".join(f"{name}={value:.6g}" for name, value in self.machine.items())
        return f"P={self.P}, S={self.S}, {sizes}; {machine}"

    @property
    def options(self) -> list[tuple[str, int]]:
        return cost.candidates(self.P)


def truth(given: Problem) -> tuple[np.ndarray, ...]:
    """Return each option's bytes, seconds, reason as a number, and place, in the order of `candidates`."""
    c, machine = given.S // given.P, given.machine
    rates = machine["flops_per_s"], machine["bytes_per_s"], machine["latency_s"]
    rows: dict[tuple[str, int], list[float]] = {key: [NONE, NONE, HEADS, NONE] for key in given.options}
    usable = []
    for way in cost.ways(sizes_of(given.layer), given.P):
        key, seconds = (way.schedule, way.ulysses), way.exposed_s(c, *rates)
        fits = way.held_bytes * c <= machine["memory_bytes"]
        reason = MEMORY if not fits else HIDDEN if seconds == 0 else EXPOSED
        rows[key] = [float(way.sent_bytes * c), seconds, reason, NONE]
        if fits:
            usable.append(key)
    for place, key in enumerate(sorted(usable, key=lambda key: rows[key][1])):
        rows[key][3] = float(place)
    return tuple(np.array(column) for column in zip(*rows.values(), strict=True))


def _number(value: Any, name: str) -> float:
    if value is None:
        return NONE
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, (int, float, np.number)) or isinstance(value, bool):
        raise Failure(f"{name} should be a number, or None, but is a {type(value).__name__}.")
    return float(value)


def _rows(answer: Any, given: Problem) -> list[dict[str, Any]]:
    """Return the rows of a report, one for each option. Raises: Failure if the report has another form."""
    if not isinstance(answer, (list, tuple)) or not all(isinstance(row, dict) for row in answer):
        raise Failure(
            "The report should be a list of dicts, one for each option: is the `return` missing?",
            f"it is a {type(answer).__name__}",
        )
    for row in answer:
        if set(row) != set(KEYS):
            raise Failure(
                f"A row of the report should have the keys {', '.join(KEYS)}.",
                f"it has {', '.join(map(str, row))}",
            )
        if not isinstance(row["reason"], str) or row["reason"] not in cost.REASONS:
            raise Failure(f"A reason is one of {', '.join(cost.REASONS)}.", f"{row['reason']!r:.40}")
    found = [(str(row["schedule"]), _number(row["ulysses"], "ulysses")) for row in answer]
    text = f"{given.text}: {len(found)} rows, {', '.join(f'{name} U={U:g}' for name, U in found)}"
    if extra := set(found) - set(given.options):
        named = ", ".join(f"{name} U={U:g}" for name, U in sorted(extra))
        raise Failure(
            "The report has an option that does not exist. The options are ring and allgather (U = 1), ulysses (U = P), "
            "hybrid (1 < U < P, U divides P).",
            f"{given.text}: {named}",
        )
    if len(found) != len(set(found)):
        raise Failure("The report lists an option twice.", text)
    if missing := set(given.options) - set(found):
        H, K = given.layer["H"], given.layer["K"]
        if not any(shareable(H, K, int(U)) for _, U in missing):
            raise mistake("leaves_out_the_refused").failure(text)
        raise Failure("Options are missing from the report.", text)
    return list(answer)


def read(answer: Any, given: Problem) -> tuple[np.ndarray, ...]:
    """Return a report in the form of `truth`.

    Raises: Failure if the report has another form, or if a usable option comes after an unusable one.
    """
    rows = {(row["schedule"], row["ulysses"]): (place, row) for place, row in enumerate(_rows(answer, given))}
    columns = []
    unusable = [place for place, row in rows.values() if row["reason"] in ("memory", "heads")]
    usable = [place for place, row in rows.values() if row["reason"] not in ("memory", "heads")]
    if unusable and usable and min(unusable) < max(usable):
        raise Failure(
            "An option that cannot be used comes before one that can.",
            f"{given.text}: places {unusable} of {len(rows)}",
        )
    for key in given.options:
        place, row = rows[key]
        numbers = _number(row["bytes"], "bytes"), _number(row["exposed_s"], "exposed_s")
        if not all(np.isfinite(numbers)):
            raise Failure("bytes and exposed_s should be finite.", f"{given.text}: {numbers}")
        if row["exposed_s"] is not None and numbers[1] < 0:
            raise mistake("waits_below_zero").failure(
                f"{given.text}: {_called(key)}: exposed_s {numbers[1]:.3g}"
            )
        at = float(place) if place in usable else NONE
        columns.append((*numbers, float(cost.REASONS.index(row["reason"])), at))
    return tuple(np.array(column) for column in zip(*columns, strict=True))


def _verify(subject: Any, cases: Sequence[Problem]) -> None:
    """Compare the reports with the right ones. The counterexample lists the options whose rows are wrong."""
    wrong = None
    for given in cases:
        try:
            report = read(subject.call(dict(given.layer), given.S, given.P, dict(given.machine)), given)
        except Failure:  # an error after a wrong report only ends the comparison
            if wrong is None:
                raise
            break
        right = truth(given)
        if wrong is None and not is_close(report, right, BOUND):
            wrong = given, report, right
    if wrong is not None:
        message, lines = _differences(*wrong)
        raise Failure(message, "\n".join([wrong[0].text, *lines]))


def _differences(
    given: Problem, report: Sequence[np.ndarray], right: Sequence[np.ndarray]
) -> tuple[str, list[str]]:
    """Return a message that names the wrong columns of a report, and a line for each wrong row."""
    lines, columns = [], set()
    for key, answer, should in zip(
        given.options, zip(*report, strict=True), zip(*right, strict=True), strict=True
    ):
        ill = [name for name, a, b in zip(NAMES, answer, should, strict=True) if not is_close(a, b, BOUND)]
        columns |= set(ill)
        if ill:
            said = [_compared(name, answer, should) for name in ill]
            if "reason" in ill and MEMORY in (answer[2], should[2]) and HEADS not in (answer[2], should[2]):
                said.append(_held(given, key))
            lines.append(f"  {_called(key)}: {'; '.join(said)}")
    shown = " and ".join("the order" if name == "place" else name for name in NAMES if name in columns)
    return f"The report is wrong in {shown}.", lines


def _held(given: Problem, key: tuple[str, int]) -> str:
    """Return in words the memory that an option needs and the memory that the machine has."""
    held = cost.way(sizes_of(given.layer), given.P, *key).held_bytes * (given.S // given.P)
    held_mb, memory_mb = apart(held / 1e6, given.machine["memory_bytes"] / 1e6, digits=4)
    return f"it holds {held_mb} MB, and the memory has {memory_mb} MB"


def _compared(name: str, answer: Sequence[float], truth: Sequence[float]) -> str:
    """Return both values in words.

    Seconds have at least four digits, and as many as distinguish the two values.
    """
    pairs = ((_said(name, answer, digits), _said(name, truth, digits)) for digits in (4, 6, 9, 12))
    got, right = next((pair for pair in pairs if pair[0] != pair[1]), (f"{answer}", f"{truth}"))
    return f"{name} {got}, should be {right}"


def _said(name: str, row: Sequence[float], digits: int = 4) -> str:
    value = dict(zip(NAMES, row, strict=True))[name]
    if name == "reason":
        return repr(cost.REASONS[int(value)])
    if value == NONE:
        return "None" if name != "place" else "among the unusable"
    if name == "place":
        return f"number {int(value) + 1}"
    return f"{value:,.0f}" if name == "bytes" else f"{value * 1e3:.{digits}g} ms"


def _called(key: tuple[str, int]) -> str:
    name, U = key
    return f"{name} U={U}" if name == "hybrid" else name


def hop_s(way: cost.Way, c: int, F: float, B: float, lat: float) -> float:
    """Return the seconds of one hop."""
    return way.hop_bytes * c / B + lat


def block_s(way: cost.Way, c: int, F: float, B: float, lat: float) -> float:
    """Return the seconds of the block that is computed during a hop."""
    return way.block_flops * c**2 / F


def is_clear(given: Problem) -> bool:
    """Return whether every order and reason is independent of rounding."""
    c, machine = given.S // given.P, given.machine
    rates = machine["flops_per_s"], machine["bytes_per_s"], machine["latency_s"]
    found = cost.ways(sizes_of(given.layer), given.P)
    for way in found:
        hop, block = hop_s(way, c, *rates), block_s(way, c, *rates)
        if way.hops and abs(hop - block) < CLEAR * hop:
            return False
        if abs(way.held_bytes * c - machine["memory_bytes"]) < CLEAR * machine["memory_bytes"]:
            return False
    seconds = sorted(way.exposed_s(c, *rates) for way in found)
    return all(b - a > CLEAR * b or b == 0 for a, b in pairwise(seconds))


def _problem(
    heads: tuple[int, int],
    P: int,
    tokens: int,
    *,
    ratio: float,
    latency: float = 0.0,
    memory: float = 1e18,
    flops: float = 1e12,
) -> Problem:
    """Return a problem in which a hop of the ring, without latency, takes `ratio` times as long as a block.

    latency: the latency divided by the time of a block of the ring. flops: the rank's FLOPs per second; all
    times shrink as it grows.
    """
    layer = {"B": 1, "H": heads[0], "K": heads[1], "D": 64, "itemsize": 2}
    ring = cost.way(sizes_of(layer), P, "ring")
    block = ring.block_flops * tokens**2 / flops
    machine = {
        "flops_per_s": flops,
        "bytes_per_s": ring.hop_bytes * tokens / (ratio * block),
        "latency_s": latency * block,
        "memory_bytes": memory,
    }
    return Problem(layer, tokens * P, P, machine)


def _drawn(rng: np.random.Generator, make: Callable[[float], Problem]) -> Problem:
    """Return a problem in which nothing depends on rounding. `make` gets a number from 0.9 to 1.1."""
    for _ in range(200):
        given = make(float(rng.uniform(0.9, 1.1)))
        if is_clear(given):
            return given
    raise RuntimeError(f"no clear problem in 200 draws, the last: {given.text}")


def _check_seconds(subject: Any, rng: np.random.Generator) -> None:
    """Check reports without latency, for hops that take half to three times as long as blocks."""
    asked = [((8, 4), 2, 256, 2.0), ((8, 8), 4, 1024, 0.5), ((8, 8), 4, 256, 3.0), ((8, 4), 4, 512, 1.5)]
    _verify(subject, [_drawn(rng, lambda x, h=h, P=P, c=c, r=r: _problem(h, P, c, ratio=r * x)) for h, P, c, r in asked])  # fmt: skip


def _check_latency(subject: Any, rng: np.random.Generator) -> None:
    asked = [((8, 8), 4, 64, 1.5, 2.0), ((16, 2), 8, 128, 0.4, 0.5), ((16, 4), 8, 128, 3.0, 0.25)]
    _verify(subject, [_drawn(rng, lambda x, h=h, P=P, c=c, r=r, lat=lat: _problem(h, P, c, ratio=r * x, latency=lat * x)) for h, P, c, r, lat in asked])  # fmt: skip


def _check_heads(subject: Any, rng: np.random.Generator) -> None:
    """Check reports for layers whose heads some rows of ranks cannot share.

    The options with such rows come last, with a reason.
    """
    asked = [((8, 2), 16, 256, 2.0), ((12, 4), 6, 256, 1.5), ((24, 8), 12, 128, 0.5)]
    _verify(subject, [_drawn(rng, lambda x, h=h, P=P, c=c, r=r: _problem(h, P, c, ratio=r * x)) for h, P, c, r in asked])  # fmt: skip


def _tight(given: Problem, schedule: str, ulysses: int, share: float) -> Problem:
    """Return the problem with `share` times the memory that an option needs."""
    way = cost.way(sizes_of(given.layer), given.P, schedule, ulysses)
    held = share * way.held_bytes * (given.S // given.P)
    return replace(given, machine=given.machine | {"memory_bytes": held})


def _check_room(subject: Any, rng: np.random.Generator) -> None:
    """Check reports for memory that is just too small for an option, or just large enough.

    In the last cases, rows have more ranks than there are K/V heads.
    """
    asked = [
        ("allgather", 1, 0.98),
        ("ulysses", 4, 0.98),
        ("hybrid", 2, 0.98),
        ("hybrid", 2, 1.02),
        ("ring", 1, 0.98),
    ]
    few = [("hybrid", 8, 0.98), ("ulysses", 16, 0.98), ("hybrid", 8, 1.02)]
    cases = [((8, 8), 4, 512, *key) for key in asked] + [((32, 2), 16, 64, *key) for key in few]
    _verify(subject, [_drawn(rng, lambda x, h=h, P=P, c=c, n=n, U=U, s=s: _tight(_problem(h, P, c, ratio=1.5 * x), n, U, s)) for h, P, c, n, U, s in cases])  # fmt: skip


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """Check reports for real models on 2 to 32 ranks, with memory that is too small for some options."""

    def make(_: float) -> Problem:
        K = int(rng.choice([4, 8, 16]))
        P = int(rng.choice([2, 4, 8, 16, 32]))
        given = _problem((K * int(rng.choice([1, 4, 8])), K), P, 2 ** int(rng.integers(8, 15)),
                         ratio=float(rng.uniform(0.1, 4)), latency=float(rng.uniform(0, 1)), flops=float(rng.choice([1e12, 1e18])))  # fmt: skip
        wider = replace(
            given, layer=given.layer | {"B": int(rng.integers(1, 4)), "itemsize": int(rng.choice([1, 2, 4]))}
        )
        return _tight(wider, str(rng.choice(["ring", "allgather"])), 1, float(rng.uniform(0.9, 2.5)))  # fmt: skip

    _verify(subject, [_drawn(rng, make) for _ in range(8)])


STAGE = Stage(
    id="15.choose",
    function="choose",
    title="A decision report",
    helpers=("bytes_sent",),
    hints=(
        "Which messages of each schedule run while something is computed, and how much is computed meanwhile? Which messages have nothing to hide behind?",
        "Treat all of them as a row of U ranks (1 for the ring, P for Ulysses) and a ring of P/U. First come the all-to-alls, or the all-gather, with two latencies. Then "
        "P/U − 1 hops, each beside a block of U·L tokens and H/U heads. Held: the rank's own tokens, its heads of the row's tokens, and one visiting block.",
        r"$\mathrm{exposed} = \frac{\text{bytes up front}}{\beta} + 2\ell + \left(\frac PU - 1\right)\max\left(0,\ \frac{2BDe\,U L h}{\beta} + \ell - \frac{2BD\,\frac HU (U L)^2}{F}\right)$; $\beta$ is bytes_per_s, $F$ is flops_per_s, $\ell$ is latency_s, $h = \max(1, \lfloor K/U \rfloor)$",
    ),
    misconceptions=misconceptions_of("15.choose"),
    checks=(
        Check("seconds", 3, "visible", "seconds, order and reasons, without latency", _check_seconds),
        Check("heads", 1, "visible", "heads that ranks cannot share", _check_heads),
        Check("room", 2, "visible", "what does not fit", _check_room),
        Check("latency", 1, "visible", "messages that take time of their own", _check_latency),
        Check("any", 2, "held-out", "real layers, many ranks", _check_any),
    ),
)  # fmt: skip
