"""Numbers, durations and other people's text as a page shows them; what learners wrote steers no page."""

from __future__ import annotations

import math
import re
from datetime import datetime

from markupsafe import Markup, escape

from ringlab_course.gradebook.formulas import formula

TEXT, NAME = 4000, 80
"""The most characters shown of a text, and of a name."""

_PIECES = re.compile(r"`([^`\n]+)`|\$([^$\n]+)\$")


def legible(text: object, limit: int = TEXT) -> str:
    r"""Return `text` without a character that could steer a page or a reader's eye, cut at `limit` characters.

    Control characters, direction overrides and halves of surrogate pairs come out as escapes.

    >>> legible("a\x1b[2Jb\u202egpj"), legible("x" * 9, 5)
    ('a\\x1b[2Jb\\u202egpj', 'xxxxx … (4 more characters)')
    """
    given = text if isinstance(text, str) else str(text)
    shown = "".join(map(_visible, given[:limit]))
    return shown if len(given) <= limit else f"{shown} … ({len(given) - limit:,} more characters)"


def name(text: object) -> str:
    """Return a learner's or file's name on one line, as `legible` does."""
    return legible(text, NAME).replace("\n", "\\n").strip() or "(no name)"


def short(text: object, limit: int) -> str:
    """Return the beginning of a text as a label of at most about `limit` characters."""
    given = str(text)
    return legible(given if len(given) <= limit else given[: limit - 1] + "…").replace("\n", " ")


def sentence(text: object, limit: int = 500) -> str:
    """Return a reason or message with a capital at its beginning."""
    shown = legible(text, limit)
    return shown[:1].upper() + shown[1:]


def prose(text: object) -> Markup:
    """Return a course's sentence as HTML: `code` and $mathematics$ set as such, all else escaped."""
    shown, parts, end = legible(text), [], 0
    for match in _PIECES.finditer(shown):
        parts += [escape(shown[end : match.start()]), _piece(*match.groups())]
        end = match.end()
    return Markup("").join([*parts, escape(shown[end:])])


def points(value: float) -> str:
    """Return points with at most two decimals: 12, 12.5, 0.33."""
    return f"{round(value, 2):g}"


def duration(seconds: float) -> str:
    """Return a length of time as people say it, in its two largest units.

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
    """Return an ISO 8601 time as 2026-11-02 23:59 UTC; what is none, as text."""
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
