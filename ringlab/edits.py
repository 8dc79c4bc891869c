"""Wrong programs as edits of a right one, kept in Markdown files that a code host shows with coloured lines.

    # Title
    Free text up to the first entry.

    ## averages_blocks
    kind forward · found_by values

    Paragraphs that describe the mistake. Their lines are joined with single spaces.

    ```diff
         total = logaddexp(lse, new_lse)
    -    return out * a + new * b, total
    +    return (out + new) / 2, total
    ```

An entry is a name, one line of fields, paragraphs, and at most one fence. Hunks in the fence are separated
by a line "@@". Each of their lines begins with " " (context), "-" (removed) or "+" (added); an empty line is
empty context. The context and removed lines of a hunk must occur exactly once in the text that results from
the hunks before it.

`python -m ringlab.edits right.py wrong.py` prints the fence of a new entry.
"""

from __future__ import annotations

import argparse
import linecache
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from types import ModuleType

from ringlab.errors import EditError

_SEPARATOR = "@@"
_BEGIN, _END = "```diff", "```"


@dataclass(frozen=True)
class Entry:
    """A wrong program: its fields by key, its paragraphs between blank lines, and the lines of its fence."""

    name: str
    fields: dict[str, str]
    text: str
    hunks: str


def read(
    source: Path | str, *, required: Collection[str] = (), optional: Collection[str] = ()
) -> tuple[Entry, ...]:
    """Return the entries of a file or a text, in order. Only the keys that the caller names may occur.

    Raises: EditError, with the file and the entry, if a key is unknown, missing or repeated, if a line of a fence is
    invalid, if a fence is not the last thing in its entry, or if two entries have the same name.
    """
    text, file = (source.read_text("utf-8"), source.name) if isinstance(source, Path) else (source, "text")
    entries: dict[str, Entry] = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, rest = section.partition("\n")
        name, (line, _, body) = heading.strip(), rest.partition("\n")
        where = f"{file}, entry {name!r}"
        if name in entries:
            raise EditError(f"{where}: a name that no other entry has", "two entries", "rename one of them")
        fields = _fields(line.strip(), where, required, optional)
        entries[name] = Entry(name, fields, *_text_and_hunks(body.split("\n"), where))
    return tuple(entries.values())


def apply(hunks: str, base: str, where: str = "edits") -> str:
    """Return `base` with the hunks applied one after the other. Empty `hunks` leave `base` unchanged.

    Raises: EditError, with `where` and the number of the hunk, for an invalid line or hunk, or a hunk whose context
    and removed lines do not occur exactly once.
    """
    lines = base.split("\n")
    for number, (before, after) in enumerate(_parsed(hunks, where), start=1):
        places = _places(before, lines)
        if len(places) != 1:
            raise EditError(
                f"{where}, hunk {number}: its context and removed lines exactly once in the base text",
                f"{len(places)} times:\n" + "\n".join(before),
                "add lines of context" if places else "compare these lines with the base text",
            )
        lines[places[0] : places[0] + len(before)] = after
    return "\n".join(lines)


def as_module(source: str, name: str) -> ModuleType:
    r"""Return a module with this source text, which tracebacks can quote.

    >>> as_module("def twice(x):\n    return 2 * x", "ringlab_example").twice(21)
    42
    """
    module = ModuleType(name)
    linecache.cache[f"<{name}>"] = len(source), None, source.splitlines(keepends=True), f"<{name}>"
    sys.modules[name] = module  # dataclasses look up their module here
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module


def diff(base: str, wrong: str) -> str:
    r"""Return hunks that turn `base` into `wrong`, with just enough context that each occurs exactly once.

    >>> print(diff("one\ntwo\nthree", "one\n2\nthree"))
    -two
    +2
    """
    old, new = base.split("\n"), wrong.split("\n")
    hunks = []
    for start, stop, new_start, new_stop in _changes(old, new):
        text = new[:new_start] + old[start:]  # the old text with the hunks so far applied
        end = new_start + stop - start
        before, after = _context(text, new_start, end)
        lines = [f" {line}" for line in text[new_start - before : new_start]]
        lines += _marked(old[start:stop], new[new_start:new_stop])
        lines += [f" {line}" for line in text[end : end + after]]
        hunks.append("\n".join("" if line == " " else line for line in lines))
    return f"\n{_SEPARATOR}\n".join(hunks)


def _fields(line: str, where: str, required: Collection[str], optional: Collection[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for field in filter(None, line.split(" · ")):
        key, _, value = field.strip().partition(" ")
        if key not in required and key not in optional:
            known = ", ".join([*required, *optional]) or "none"
            raise EditError(
                f"{where}: keys among {known}", f"key {key!r}", "the line below the name has fields"
            )
        if key in fields or not value.strip():
            got = "two values" if key in fields else "no value"
            raise EditError(f"{where}: one value of key {key!r}", got, "write key value · key value")
        fields[key] = value.strip()
    if missing := [key for key in required if key not in fields]:
        raise EditError(
            f"{where}: key {missing[0]!r}", line or "an empty line", "add it to the line below the name"
        )
    return fields


def _text_and_hunks(body: list[str], where: str) -> tuple[str, str]:
    fences = [number for number, line in enumerate(body) if line.startswith("```")]
    prose, hunks = body, ""
    if fences:
        begin, end = fences[0], fences[-1]
        marks = [body[number].rstrip() for number in fences]
        if marks != [_BEGIN, _END] or any(line.strip() for line in body[end + 1 :]):
            raise EditError(
                f"{where}: at most one fence, from {_BEGIN} to {_END}, and nothing after it",
                ", ".join(marks) if marks != [_BEGIN, _END] else "text after it",
                "put all hunks into one fence, with @@ between them, at the end of the entry",
            )
        prose, hunks = body[:begin], "\n".join(body[begin + 1 : end])
        _parsed(hunks, where)
    paragraphs = re.split(r"\n\s*\n", "\n".join(prose).strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs), hunks


def _parsed(hunks: str, where: str) -> list[tuple[list[str], list[str]]]:
    """Return (old lines, new lines) of each hunk. Raises: EditError for an invalid line or hunk."""
    if not hunks:
        return []
    groups: list[list[str]] = [[]]
    for line in hunks.split("\n"):
        if line == _SEPARATOR:
            groups.append([])
        elif line[:1] in ("", " ", "-", "+"):
            groups[-1].append(line or " ")
        else:
            needed = f"{where}, hunk {len(groups)}: a line that begins with ' ', '-' or '+', or {_SEPARATOR}"
            raise EditError(needed, repr(line), "begin lines of context with a space")
    for number, group in enumerate(groups, start=1):
        marks = {line[0] for line in group}
        if not marks & {"-", "+"} or marks == {"+"}:
            raise EditError(
                f"{where}, hunk {number}: something to change, and a line of the base text",
                f"marks {sorted(marks)}",
                "an insertion needs a line of context",
            )
    return [
        ([x[1:] for x in group if x[0] != "+"], [x[1:] for x in group if x[0] != "-"]) for group in groups
    ]


def _changes(old: list[str], new: list[str]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, stop, new start, new stop) of each difference. Differences one line apart are joined."""
    codes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    places = [code[1:] for code in codes if code[0] != "equal"]
    while places:
        start, stop, new_start, new_stop = places.pop(0)
        limit = places[0][0] if places else len(old)
        while (
            start == stop < limit and old[stop] == new[new_start]
        ):  # moves an insertion down, so that a new function includes the blank lines below it, not above it
            start, stop, new_start, new_stop = start + 1, stop + 1, new_start + 1, new_stop + 1
        while places and places[0][0] - stop <= 1:
            _, stop, _, new_stop = places.pop(0)
        yield start, stop, new_start, new_stop


def _marked(old: list[str], new: list[str]) -> Iterator[str]:
    """Yield the marked lines of a change. Lines that do not change are context."""
    for code, start, stop, new_start, new_stop in SequenceMatcher(
        None, old, new, autojunk=False
    ).get_opcodes():
        if code == "equal":
            yield from (f" {line}" for line in old[start:stop])
        else:
            yield from (f"-{line}" for line in old[start:stop])
            yield from (f"+{line}" for line in new[new_start:new_stop])


def _context(lines: list[str], start: int, stop: int) -> tuple[int, int]:
    """Return the fewest (lines before `start`, lines after `stop`) with which lines[start:stop] occurs once."""
    size = int(start == stop)
    while True:  # ends at the latest when all lines are context, because a whole text occurs once in itself
        fitting = []
        for before in range(max(0, size - len(lines) + stop), min(size, start) + 1):
            context = lines[start - before : start] + lines[stop : stop + size - before]
            if len(_places(lines[start - before : stop + size - before], lines)) == 1:
                fitting.append((sum(map(_is_comment, context)), before))
        if fitting:
            before = min(fitting)[1]
            return before, size - before
        size += 1


def _is_comment(line: str) -> bool:
    """Return whether the line begins a comment or a docstring. Such lines change more often than code."""
    return line.lstrip().startswith(("#", '"'))


def _places(part: list[str], lines: list[str]) -> list[int]:
    return [at for at in range(len(lines) - len(part) + 1) if lines[at : at + len(part)] == part]


def main(arguments: list[str]) -> int:
    """Print the fence that turns one file into another."""
    parser = argparse.ArgumentParser(
        prog="python -m ringlab.edits", description="Print a wrong program as a fence."
    )
    parser.add_argument("right", type=Path)
    parser.add_argument("wrong", type=Path)
    asked = parser.parse_args(arguments)
    print(_BEGIN, diff(*(path.read_text("utf-8") for path in (asked.right, asked.wrong))), _END, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
