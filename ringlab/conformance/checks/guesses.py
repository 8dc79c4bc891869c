"""Guesses at the inputs that a failing target expects: other axes, another layout, or always a causal mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ringlab.conformance.cases import LAYOUTS
from ringlab.conformance.checks.measuring import measure
from ringlab.conformance.run.run import ENDLESS, Ran, Run, Trouble
from ringlab.conformance.run.source import Guessing
from ringlab.conformance.target.calling import AXES
from ringlab.conformance.target.claims import Claims

PLAIN = {"types", "forward", "masks", "layouts"}
"""The checks that fail if a target expects its inputs in a form that differs from the one it gets."""


@dataclass(frozen=True)
class Reading:
    """A hypothesis about the inputs that a target expects: the axes of q, the layout, and the mask."""

    axes: str
    layout: str
    causal: bool

    def run(self, claims: Claims) -> Run:
        """Return a small forward run with these inputs."""
        P = min((P for P in claims.ranks if P > 1), default=1)
        heads = 2 * P if claims.split_heads else 2
        dtype = "float32" if "float32" in claims.dtypes else claims.dtypes[0]
        return Run(P, 8 * P, self.layout, self.causal, H=heads, K=heads, dtype=dtype, backward=False)


def right_if(claims: Claims, opened: Callable[[], AbstractContextManager[Guessing]]) -> str:
    """Return a sentence that names the reading under which the target's plain runs are right.

    Return "" if that is the claimed reading, or if there is none. opened: returns a source of runs of the
    target. One source serves all axes, because a source takes long to start.
    """
    claimed = Reading(claims.axes, claims.layouts[0], True in claims.causal)
    found: Reading | Trouble | None = None
    with opened() as source:
        for axes in sorted(AXES, key=lambda axes: axes != claims.axes):
            if _may_go_on(found):
                found = _first(source, claims, axes)
    return _sentence(claimed, found) if isinstance(found, Reading) and found != claimed else ""


def _may_go_on(found: Reading | Trouble | None) -> bool:
    """Return whether to try more readings: no reading is right so far, and none has reached the limit.

    Another reading might take the whole time limit too.
    """
    return found is None or (isinstance(found, Trouble) and found.kind not in ENDLESS)


def _first(source: Guessing, claims: Claims, axes: str) -> Reading | Trouble | None:
    """Return the first right reading with these axes, or the trouble of a run, which ends the search."""
    readings = list(_readings(claims, axes))
    made = source.made_as(axes, [each.run(claims) for each in readings])
    for reading, ran in zip(readings, made, strict=False):
        if ran.trouble is not None:
            return ran.trouble
        if _right(ran):
            return reading
    return None


def _readings(claims: Claims, axes: str) -> Iterator[Reading]:
    """Yield the claimed layout first, then the layouts that are not claimed.

    Without a mask, all layouts give the same results, so only the claimed one is tried.
    """
    if True not in claims.causal:
        yield Reading(axes, claims.layouts[0], causal=False)
    others = (layout for layout in LAYOUTS if layout not in claims.layouts)
    for layout in (claims.layouts[0], *others):
        yield Reading(axes, layout, causal=True)


def _right(ran: Ran) -> bool:
    return all(each.ok for each in measure(ran, ("out",)))


def _sentence(claimed: Reading, found: Reading) -> str:
    where: list[str] = []
    options: list[str] = []
    fields: list[str] = []
    if found.axes != claimed.axes:
        where.append(f"for q as ({', '.join(found.axes)})")
        options.append(f"--axes {found.axes}")
        fields.append(f'axes="{found.axes}"')
    if found.layout != claimed.layout:
        where.append(f"in the layout {found.layout}")
        options.append(f"--layouts {found.layout}")
        fields.append(f'layouts=("{found.layout}",)')
    if found.causal != claimed.causal:
        where.append("with a causal mask on every call")
        fields.append("causal=(True,)")
    target = f"Target(…, {', '.join(fields)})"
    said = f"{' '.join(options)}, or {target}" if len(options) == len(fields) else target
    return f"A small forward is right {', '.join(where)}. If that is meant, say {said}."
