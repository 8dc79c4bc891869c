"""TOML files written by users: read with bounds, and refused with file, line and key.

tomllib says where a file is malformed but does not keep the lines of keys. `lines` finds them: it cuts the
text into statements (a small scan that knows strings, comments and brackets) and lets tomllib read
each statement's key. It need only be right on files that tomllib has accepted.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ringlab.cost import units
from ringlab.errors import CostError

MOST_BYTES = 256 * 1024
LONGEST_TEXT = 2000
MOST_DOTS = 200  # on one line: tomllib takes quadratic time over a key of many parts
Place = tuple[str | int, ...]

_PIECE = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}'  # strings over several lines
    r'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[{]|[\]}]|\n|=|[^"\'#\[\]{}\n=]+',
    re.DOTALL,
)


@dataclass
class Table:
    """One table of a file; its values are read by key, and errors name the line."""

    path: Path
    place: Place
    values: dict[str, Any]
    lines: dict[Place, int] = field(repr=False)

    def check_keys(self, required: Sequence[str], optional: Sequence[str] = ()) -> None:
        """Check the keys. Raises: CostError for an unknown or a missing key."""
        known = [*required, *optional]
        for key in self.values:
            if key not in known:
                remedy = f"keys here: {', '.join(known)}"
                near = close(key, [name for name in known if name not in self.values])
                if near:
                    remedy = f"did you mean {near[0]!r}? {remedy}"
                elif len(self.place) == 1 and isinstance(self.values[key], dict):
                    remedy = f'a name with a dot stands in quotes: ["{self._dotted(key)}"]; {remedy}'
                self.refuse(key, "a known key", "", remedy)
        for key in required:
            if key not in self.values:
                self.refuse(None, f"the key {key!r}", f"only {', '.join(self.values) or 'an empty table'}")

    def _dotted(self, key: str) -> str:
        """The name in the header of a table under `key`, if its dots were meant as parts of the name."""
        parts, inner = [*map(str, self.place), key], self.values[key]
        while len(inner) == 1 and isinstance(below := next(iter(inner.values())), dict):
            parts.append(next(iter(inner)))
            inner = below
        return ".".join(parts)

    def quantity(self, key: str, dimension: str, *, zero: bool = False) -> float:
        """Return the value in the unit of `dimension`, as `units.quantity` does.

        Raises: CostError for a value without such a unit, or one that is not above zero (or zero, if allowed).
        """
        try:
            value = units.quantity(self.values[key], dimension)
        except CostError as error:
            self.refuse(key, error.needed, error.got, error.remedy)
        if value < 0 or (value == 0 and not zero):
            self.refuse(key, f"a value {'of zero or more' if zero else 'above zero'}", repr(self.values[key]))
        return value

    def count(self, key: str, most: int = 10**9) -> int:
        """Return a whole number from 1 to `most`. Raises: CostError for any other value."""
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            self.refuse(key, f"a whole number from 1 to {most}, without quotes", units.shown(value))
        return int(value)

    def flag(self, key: str) -> bool:
        """Return true or false. Raises: CostError for any other value."""
        value = self.values[key]
        if not isinstance(value, bool):
            self.refuse(key, "true or false", units.shown(value))
        return bool(value)

    def text(self, key: str) -> str:
        """Return a line of text. Raises: CostError if it is empty, too long, or has control characters."""
        value = self.values[key]
        if not isinstance(value, str) or not value.strip():
            self.refuse(key, "text in quotes", units.shown(value))
        if len(value) > LONGEST_TEXT or not value.isprintable():
            self.refuse(key, f"one line of at most {LONGEST_TEXT} printable characters", units.shown(value))
        return str(value)

    def table(self, key: str) -> Table:
        """Return the table under `key`. Raises: CostError for any other value."""
        return self._table(key, self.values[key], (*self.place, key))

    def tables(self, key: str) -> list[Table]:
        """Return the array of tables under `key`. Raises: CostError for any other value."""
        rows = self.values[key]
        if not isinstance(rows, list):
            self.refuse(
                key,
                f"tables, each begun with [[{'.'.join(map(str, (*self.place, key)))}]]",
                units.shown(rows),
            )
        return [self._table(key, row, (*self.place, key, number)) for number, row in enumerate(rows)]

    def refuse(self, key: str | None, needed: str, got: str = "", remedy: str = "") -> NoReturn:
        """Refuse the table, or its value at `key`. Raises: CostError that names file, line and key."""
        place = self.place if key is None else (*self.place, key)
        name = ".".join(_shown_key(part) for part in place)
        where = f"{self.path}, line {line_of(place, self.lines)}{f', {name}' if name else ''}"
        raise CostError(
            f"{where}: {needed}", got or (f"the key {key[:80]!r}" if key is not None else ""), remedy
        )

    def _table(self, key: str, value: Any, place: Place) -> Table:
        if not isinstance(value, dict):
            self.refuse(key, f"a table, begun with [{'.'.join(map(str, place))}]", units.shown(value))
        return Table(self.path, place, value, self.lines)


def read(path: str | Path) -> Table:
    """Return the whole file as a table.

    Raises: CostError if it is missing, not a regular file, above 256 KiB, not UTF-8, or not TOML.
    """
    path = Path(path)
    text = _text(path)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > MOST_DOTS:
            raise CostError(f"{path}, line {number}: at most {MOST_DOTS} dots on a line", "more")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CostError(f"{path}, line {_line(str(error), text)}: valid TOML", str(error)[:200]) from None
    except (RecursionError, ValueError) as error:  # nested too deep; an integer of thousands of digits
        raise CostError(f"{path}: TOML of ordinary size and depth", str(error)[:200]) from None
    return Table(path, (), values, lines(text.replace("\r\n", "\n")))


def lines(text: str) -> dict[Place, int]:
    """Return the line on which each table and key of a valid TOML text begins, counted from 1.

    Keys inside inline tables and arrays have no entry of their own: see `line_of`.
    """
    found: dict[Place, int] = {}
    rows: dict[Place, int] = {}
    table: Place = ()
    for line, head in _statements(text):
        if head.startswith("["):
            keys = _keys(head.strip("[] \t") + "=0")
            table = _placed(keys, rows)
            if head.startswith("[["):
                rows[table] = rows.get(table, -1) + 1
                found.setdefault(table, line)
                table = (*table, rows[table])
            found.setdefault(table, line)
        else:
            keys = _keys(head + "=0")
            for depth in range(1, len(keys) + 1):
                found.setdefault((*table, *keys[:depth]), line)
    return found


def line_of(place: Place, lines: dict[Place, int]) -> int:
    """Return the line of `place`, or of the nearest enclosing table that has one."""
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 1)


def close(name: str, known: Sequence[str]) -> list[str]:
    """Return up to three known names similar to `name`, the most similar first."""
    return difflib.get_close_matches(name[:80].casefold(), known, n=3, cutoff=0.5)


def _shown_key(part: str | int) -> str:
    text = str(part)[:80]
    return text if text.isprintable() else repr(text)  # a terminal would obey control characters


def _text(path: Path) -> str:
    needed = f"a TOML file of at most {MOST_BYTES // 1024} KiB at {path}"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe or a device may never end
            raise CostError(needed, "no regular file")
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CostError(needed, str(reason)) from None
    if len(data) > MOST_BYTES:
        raise CostError(needed, "more")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise CostError(f"{path}, line {line}: UTF-8 text", f"the byte 0x{data[error.start]:02x}") from None


def _line(message: str, text: str) -> int:
    found = re.search(r"at line (\d+)", message)
    return int(found[1]) if found else text.count("\n") + 1


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The line on which each statement begins, and its header or its key as written."""
    line, depth, begun, head, value = 1, 0, 1, "", False
    for found in _PIECE.finditer(text):
        piece = found[0]
        if piece == "\n" and depth == 0:
            if head.strip():
                yield begun, head.strip()
            head, value = "", False
        elif not piece.startswith("#"):
            begun = begun if head.strip() else line
            value = value or piece == "="
            head += "" if value else piece
            depth += (piece in "[{") - (piece in "]}") if len(piece) == 1 else 0
        line += piece.count("\n")
    if head.strip():
        yield begun, head.strip()


def _keys(statement: str) -> list[str]:
    keys: list[str] = []
    value: Any = tomllib.loads(statement)
    while isinstance(value, dict):
        key, value = next(iter(value.items()))
        keys.append(key)
    return keys


def _placed(keys: list[str], rows: dict[Place, int]) -> Place:
    """The place that a header names: inside the last row of every array of tables along its path."""
    place: Place = ()
    for number, key in enumerate(keys):
        place = (*place, key)
        if place in rows and number < len(keys) - 1:
            place = (*place, rows[place])
    return place
