"""Reads users' TOML files into dataclasses with bounds; an error names the file, the line and the key.

A field of a dataclass is a key of its table. `key` gives the name and the unit in the file, if they differ:

    @dataclass
    class Link:
        name: str
        bytes_per_s: float = key("bandwidth", unit="bytes/s")

tomllib reports where a file is malformed, but does not keep the lines of keys. `lines` finds these lines by
letting tomllib read statement by statement. It need only be right for files that tomllib has accepted.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from ringlab.cost import units
from ringlab.errors import CostError

MOST_BYTES = 256 * 1024
LONGEST_TEXT = 2000
LARGEST_COUNT = 10**9
MOST_DOTS = 200  # the most dots on a line, because tomllib takes quadratic time for a key of many parts
MOST_LINES = 50  # the most lines of a statement, because finding its line takes quadratic time
Place = tuple[str | int, ...]
_Entry = TypeVar("_Entry")


def key(
    name: str = "",
    *,
    unit: str = "",
    zero: bool = False,
    among: Sequence[str] = (),
    default: Any = MISSING,
    required: bool = False,
    hash: bool | None = None,
) -> Any:
    """Return a dataclass field that a file has under the key `name`, by default the field's name.

    unit: the dimension of a quantity, as for `units.quantity`. zero: whether the quantity may be zero. among:
    the values that a text may have, or the keys that a table may have. required: whether a file must have the
    key although the field has a default.
    """
    how = {"key": name, "unit": unit, "zero": zero, "among": among, "required": required}
    return field(default=default, hash=hash, metadata=how)


def key_of(it: Field[Any]) -> str:
    """Return the key of a dataclass field in a file."""
    return it.metadata.get("key") or it.name


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass; for one that may be None, return the other type."""
    hints = get_type_hints(kind)
    return {name: get_args(hint)[0] if isinstance(hint, UnionType) else hint for name, hint in hints.items()}


class BadValue(CostError):
    """A value that its dataclass refuses; `place` is the field, and perhaps a name inside it."""

    def __init__(self, place: tuple[str, ...], needed: str, got: str) -> None:
        super().__init__(f"{'.'.join(place)}: {needed}", got)
        self.place, self.value_needed = place, needed


def check_values(it: Any) -> None:
    """Check the values of a dataclass whose fields have keys, whether they come from a file or not.

    Raises: CostError for a count below one, a quantity not above zero, or a word that the key does not allow.
    """
    kind: Any = type(it)
    hints = _hints(kind)
    for each in fields(it):
        value, hint = getattr(it, each.name), hints[each.name]
        among = each.metadata.get("among", ())
        if isinstance(value, Mapping):
            for name, quantity in value.items():
                _check_quantity((each.name, name), quantity, each)
        elif value is None:
            continue
        elif each.metadata.get("unit"):
            _check_quantity((each.name,), value, each)
        elif hint is int and (type(value) is not int or not 1 <= value <= LARGEST_COUNT):
            needed = f"a whole number from 1 to {LARGEST_COUNT}, without quotes"
            raise BadValue((each.name,), needed, units.shown(value))
        elif hint is bool and type(value) is not bool:
            raise BadValue((each.name,), "true or false", units.shown(value))
        elif among and value not in among:
            raise BadValue((each.name,), f"one of {', '.join(among)}", units.shown(value))


def _check_quantity(place: tuple[str, ...], value: Any, it: Field[Any]) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1e30 or (value == 0 and not it.metadata["zero"]):
        needed = f"a value {'of zero or more' if it.metadata['zero'] else 'above zero'}, at most 10^30"
        raise BadValue(place, needed, units.shown(value))
    if it.metadata["unit"] == "percent" and value > 1:
        raise BadValue(place, "at most 100 %", units.shown(value))


def written(header: str, it: Any, skipped: Sequence[str] = ()) -> str:
    """Return a dataclass as the text of a table `header` without the fields `skipped`; `Table.read` reads it back equal."""
    rows, inner = [header], []
    for each in fields(it):
        name, value, unit = key_of(each), getattr(it, each.name), each.metadata.get("unit", "")
        place = f"{header.strip('[]')}.{name}"
        if each.name in skipped or value is None:
            continue
        if isinstance(value, Mapping):
            inner.append(
                "\n".join([f"[{place}]", *(_row(k, units.written(v, unit)) for k, v in value.items())])
            )
        elif isinstance(value, tuple):
            inner += [written(f"[[{place}]]", row) for row in value]
        elif is_dataclass(value):
            inner.append(written(f"[{place}]", value))
        else:
            rows.append(_row(name, units.written(value, unit) if unit else value))
    return "\n\n".join(["\n".join(rows), *inner])


def _row(key: str, value: str | int) -> str:
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"


@dataclass
class Table:
    """One table of a file; its values are read by key, and errors name the line."""

    path: Path
    place: Place
    values: dict[str, Any]
    source: str = field(repr=False)  # the text of the whole file

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
        """Return the dotted name that a user may have meant in a table's header, where dots have split it into parts."""
        parts, inner = [*map(str, self.place), key], self.values[key]
        while len(inner) == 1 and isinstance(below := next(iter(inner.values())), dict):
            parts.append(next(iter(inner)))
            inner = below
        return ".".join(parts)

    def read(self, kind: type[_Entry], **given: Any) -> _Entry:
        """Return a dataclass of this `kind`, with each field read from its key unless it is `given`.

        Raises: CostError for an unknown or a missing key, or a value of a wrong kind, unit or size.
        """
        asked = {key_of(it): it for it in fields(kind) if it.name not in given}  # type: ignore[arg-type]
        needed = [key for key, it in asked.items() if it.default is MISSING or it.metadata.get("required")]
        self.check_keys(needed, [key for key in asked if key not in needed])
        of_kind: Any = kind
        hints = _hints(of_kind)
        found = {
            it.name: self._value(key, it, hints[it.name]) for key, it in asked.items() if key in self.values
        }
        try:
            return kind(**given, **found)
        except BadValue as error:
            of_field, *inside = error.place
            key = next(key for key, it in asked.items() if it.name == of_field)
            table, key = (self.table(key), inside[0]) if inside else (self, key)
            table.refuse(key, error.value_needed, units.shown(table.values[key]))

    def _value(self, key: str, it: Field[Any], hint: Any) -> Any:
        """Return the value of a field, read as its annotation demands."""
        if isinstance(hint, type) and is_dataclass(hint):
            return self.table(key).read(hint)
        if get_origin(hint) is tuple:
            return tuple(row.read(get_args(hint)[0]) for row in self.tables(key))
        if get_origin(hint) is Mapping:
            inner = self.table(key)
            inner.check_keys((), it.metadata["among"])
            if not inner.values:
                among = ", ".join(it.metadata["among"])
                self.refuse(key, f"{it.metadata['unit']} of at least one of {among}", "an empty table")
            return {name: inner.quantity(name, it.metadata["unit"]) for name in inner.values}
        if hint is float:
            return self.quantity(key, it.metadata["unit"])
        return self.text(key) if hint is str else self.values[key]

    def quantity(self, key: str, dimension: str) -> float:
        """Return the value in the unit of `dimension`, as `units.quantity` does. Raises: CostError for any other value."""
        try:
            return units.quantity(self.values[key], dimension)
        except CostError as error:
            self.refuse(key, error.needed, error.got, error.remedy)

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
        """Refuse the table or its value at `key`. Raises: CostError that names the file, line and key."""
        place = self.place if key is None else (*self.place, key)
        name = ".".join(_shown_key(part) for part in place)
        where = f"{self.path}, line {line_of(place, lines(self.source))}{f', {name}' if name else ''}"
        raise CostError(
            f"{where}: {needed}", got or (f"the key {key[:80]!r}" if key is not None else ""), remedy
        )

    def _table(self, key: str, value: Any, place: Place) -> Table:
        if not isinstance(value, dict):
            self.refuse(key, f"a table, begun with [{'.'.join(map(str, place))}]", units.shown(value))
        return Table(self.path, place, value, self.source)


def read(path: str | Path) -> Table:
    """Return the whole file as a table.

    Raises: CostError if the file is missing, not a regular file, above 256 KiB, not UTF-8, or not TOML.
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
    except (RecursionError, ValueError) as error:  # nested too deep, or an integer of thousands of digits
        raise CostError(f"{path}: TOML of ordinary size and depth", str(error)[:200]) from None
    return Table(path, (), values, text.replace("\r\n", "\n"))


def lines(text: str) -> dict[Place, int]:
    """Return the line on which each table and key of a valid TOML text begins, counted from 1.

    Keys inside arrays have no entries; see `line_of`.
    """
    found: dict[Place, int] = {}
    rows: dict[Place, int] = {}
    table: Place = ()
    for line, statement, values in _statements(text):
        places = list(_places(values))
        if not statement.startswith("["):
            for place in places:
                found.setdefault((*table, *place), line)
            continue
        table = _in_last_rows(places[-1], rows)
        if statement.startswith("[["):
            rows[table] = rows.get(table, -1) + 1
            found.setdefault(table, line)
            table = (*table, rows[table])
        found.setdefault(table, line)
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
            raise CostError(needed, "not a regular file")
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


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield, for each statement, the line on which it begins, its text, and the table that it defines."""
    begun, statement = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        begun = begun if statement else number
        statement += line + "\n"
        if number - begun > MOST_LINES:
            return
        try:
            values = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:  # the statement goes on in the next line
            continue
        if values:
            yield begun, statement.lstrip(), values
        statement = ""


def _places(values: dict[str, Any]) -> Iterator[Place]:
    """Yield the places of all keys, outer before inner; an array of tables counts as one table."""
    for name, value in values.items():
        yield (name,)
        inner = value[0] if isinstance(value, list) and value == [{}] else value
        if isinstance(inner, dict):
            yield from ((name, *place) for place in _places(inner))


def _in_last_rows(keys: Place, rows: dict[Place, int]) -> Place:
    """Return the place that a header names, which is inside the last row of every array of tables along its path."""
    place: Place = ()
    for number, key in enumerate(keys):
        place = (*place, key)
        if place in rows and number < len(keys) - 1:
            place = (*place, rows[place])
    return place
