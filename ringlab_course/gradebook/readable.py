"""Turn numbers, durations, entries and learners' text into the text that pages show.

Learners' text cannot change the structure of a page. File names become one line without control characters,
and different names always look different.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from markupsafe import Markup, escape

from ringlab.errors import CourseError
from ringlab_course.checking.loading import load_stage
from ringlab_course.gradebook.entry import Entry
from ringlab_course.gradebook.formulas import formula
from ringlab_course.notebook.checks import RUNGS

TEXT, NAME = 4000, 80
"""The most characters shown of a text, and of a name."""

_PIECES = re.compile(r"`([^`\n]+)`|\$([^$\n]+)\$")


def legible(text: object, limit: int = TEXT) -> str:
    r"""Return `text` without characters that could change a page or mislead a reader.

    At most `limit` characters are shown. Control characters, direction overrides and halves of surrogate
    pairs are replaced by escapes.

    >>> legible("a\x1b[2Jb\u202egpj"), legible("x" * 9, 5)
    ('a\\x1b[2Jb\\u202egpj', 'xxxxx … (4 more characters)')
    """
    given = text if isinstance(text, str) else str(text)
    shown = "".join(map(_visible, given[:limit]))
    return shown if len(given) <= limit else f"{shown} … ({len(given) - limit:,} more characters)"


def name(text: object) -> str:
    """Return a learner's or a file's name on one line, cleaned by `legible`."""
    return legible(text, NAME).replace("\n", "\\n").strip() or "(no name)"


def short(text: object, limit: int) -> str:
    """Return the beginning of a text as a label of at most about `limit` characters."""
    given = str(text)
    return legible(given if len(given) <= limit else given[: limit - 1] + "…").replace("\n", " ")


def sentence(text: object, limit: int = 500) -> str:
    """Return a reason or a message with a capital first letter."""
    shown = legible(text, limit)
    return shown[:1].upper() + shown[1:]


def prose(text: object) -> Markup:
    """Return a sentence as HTML, with `code` and $mathematics$ formatted and all else escaped."""
    shown, parts, end = legible(text), [], 0
    for match in _PIECES.finditer(shown):
        parts += [escape(shown[end : match.start()]), _piece(*match.groups())]
        end = match.end()
    return Markup("").join([*parts, escape(shown[end:])])


def points(value: float) -> str:
    """Return points with at most two decimals: 12, 12.5, 0.33."""
    return f"{round(value, 2):g}"


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units.

    >>> duration(0.213), duration(7500), duration(180000)
    ('0.21 s', '2 h 5 min', '2 d 2 h')
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    for unit, below, size in (("d", "h", 86400), ("h", "min", 3600), ("min", "s", 60)):
        if seconds >= size:
            rest = int(seconds % size // {"h": 3600, "min": 60, "s": 1}[below])
            return f"{int(seconds // size)} {unit}" + (f" {rest} {below}" if rest else "")
    raise AssertionError(seconds)  # no duration gets here


def moment(iso: object) -> str:
    """Return an ISO 8601 time as 2026-11-02 23:59 UTC, and any other value as text."""
    try:
        when = datetime.fromisoformat(str(iso))
    except ValueError:
        return legible(iso, 40)
    zone = when.tzname() or ""
    return f"{when:%Y-%m-%d %H:%M} {zone}".strip()


def _visible(character: str) -> str:
    if character.isprintable() or character in "\n\u00a0\u202f":
        return character
    return "    " if character == "\t" else character.encode("unicode_escape").decode("ascii")


def _piece(code: str | None, tex: str | None) -> Markup:
    return Markup("<code>{}</code>").format(code) if code is not None else formula(tex or "")


def shown_name(name: str | os.PathLike[str]) -> str:
    r"""Return `name` as text that can be printed, stored and compared.

    Unprintable characters, bytes that are not UTF-8, and backslashes are written as escapes, so that two
    different names never give the same text.

    >>> print(shown_name("ada"), shown_name("a\nb"), shown_name("a\\nb"))
    ada a\nb a\\nb
    """
    return "".join(map(_escaped, os.fspath(name)))


def _escaped(character: str) -> str:
    # Surrogates are included: they are not printable, and represent the bytes of a name that are not UTF-8.
    if character.isprintable() and character != "\\":
        return character
    return character.encode("unicode_escape").decode("ascii")


_INDENT = "      "


def headline(entry: Entry) -> str:
    """Return one line: learner, exercise, score, and the reason if the score differs from the earned points."""
    notes = []
    earned = entry.earned + entry.helped
    if entry.penalty:
        notes.append(f"{earned:g} earned, {entry.penalty:g} off for {duration(entry.late_s)} late")
    if entry.override is not None:
        notes += [] if entry.penalty else [f"{earned:g} earned"]
        notes.append(f"overridden: {entry.override_reason}")
        notes += ["more than there are to earn"] if 0 < entry.maximum < entry.override else []
    notes += helped(entry)
    notes += filter(None, (entry.report.get("label"), entry.report.get("reason")))
    notes += ["graded by older checks"] if entry.older_checks else []
    tail = f"  ({'; '.join(notes)})" if notes else ""
    name = f"{entry.learner}  {entry.exercise or '?'}"
    return f"{name}: {entry.score:g} of {entry.maximum:g} points{tail}"


def helped(entry: Entry) -> list[str]:
    """Return what the reference's helpers add to an entry, as a list of one note or none."""
    if entry.helped:
        return [f"{entry.helped:g} of these points with the reference's helpers"]
    more = entry.earned_with_reference - entry.earned
    return [f"{more:g} more with the reference's helpers, not counted"] if more else []


def with_reference(stage: Mapping[str, Any], *, counted: bool = True) -> str:
    """Return what a stage of a report earns with the reference's helpers, or "" if it was not graded again.

    counted: whether these points count.
    """
    if not stage.get("replaced"):
        return ""
    names = " and ".join(f"`{name}`" for name in stage["replaced"])
    whole = sum(check["points"] for check in stage["checks"])
    verb = "earns" if counted else "would earn"
    return f"with the reference's {names}, this stage {verb} {stage['earned_again']:g} of {whole:g} points"


def explained(entry: Entry, history: Iterable[Entry] = ()) -> Iterator[str]:
    """Yield the lines of a detailed report that helps to answer the learner.

    The hint depends on the number of different notebooks that failed the stage: after the first failure it is
    a question, after the second a direction, then a line of mathematics.
    """
    yield headline(entry)
    yield f"  graded in {entry.seconds:.1f} s; handed in {entry.submitted_at or 'nobody knows when'}"
    past = [*history]
    for stage in entry.report["stages"]:
        failed = [check for check in stage["checks"] if not check["ok"]]
        took = sum(check.get("seconds") or 0.0 for check in stage["checks"])
        head = f"{len(stage['checks']) - len(failed)} of {len(stage['checks'])} checks hold"
        yield f"  {stage['stage']}: {stage['status']}, {head}, {took:.2f} s"
        said: set[str] = set()
        for check in failed:
            yield f"    ✗ {check['title']} ({check['tier']}, {check['points']} points, {check.get('seconds') or 0.0:.2f} s)"
            message = "the same as above" if check["message"] in said else check["message"]
            said.add(check["message"])
            if check.get("misconception"):
                message = f"{message} [{check['misconception']}]"
            yield from textwrap.wrap(message, 100, initial_indent=_INDENT, subsequent_indent=_INDENT)
            example = legible(check.get("counterexample") or "")
            if example not in said:
                yield from textwrap.indent(example, _INDENT + "  ").splitlines()
            said.add(example)
        for check in stage["checks"]:
            if not check.get("counted", True):
                yield f"    ○ {check['title']} ({check['tier']}, {check['points']} points): holds, not counted"
        if again := with_reference(stage, counted=entry.counts_reference):
            yield f"    {again}"
        if failed:
            yield from _hint(stage["stage"], _failures(stage["stage"], past))


def _failures(stage_id: str, history: Iterable[Entry]) -> int:
    return len(
        {
            entry.digest
            for entry in history
            for stage in entry.report["stages"]
            if stage["stage"] == stage_id and stage["status"] != "ok"
        }
    )


def _hint(stage_id: str, failures: int) -> Iterator[str]:
    try:
        hints = load_stage(stage_id).hints
    except CourseError:  # the course no longer has this stage
        return
    rung = min(max(1, failures), len(hints))
    text = f"hint {rung} of {len(hints)}, {RUNGS[rung - 1]}: {hints[rung - 1]}"
    yield from textwrap.wrap(text, 100, initial_indent="    → ", subsequent_indent=_INDENT)
