"""docs/api.md: every name in `ringlab.__all__`, with its signature, its result and an example."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ringlab

from ..website import members
from ..website.api import exports, read
from ..website.docstrings import first_sentence, to_markdown
from ..website.links import table
from ..website.members import Member

HEAD = """\
# The public names

What `from ringlab import …` gives: each name with its signature, its result and an example. Everything else in the package can be
imported too, by the path of its module ([architecture](architecture.md) lists them), but may change between minor versions.

Axis letters: B batch, H query heads, K key/value heads (H % K == 0), D head dim, S tokens of the whole sequence, L tokens
of one rank, P ranks. Tensors are (B, H, L, D). `lse` is (B, H, L), a natural logarithm.
"""
ERRORS = """\
## errors

All errors that ringlab raises on purpose derive from `errors.RinglabError` and say what was needed, what came, and the
remedy. They also derive from the built-in error that fits, such as ValueError.
"""
WIDTH = 100


@dataclass(frozen=True)
class Entry:
    """A public name as written after `import ringlab`, its member, and the array types of its module."""

    name: str
    member: Member
    aliases: dict[str, str]


def page(root: Path) -> str:
    """Return the page for the checkout at `root`."""
    found = list(_public(root))
    anchors = _anchors([entry.name for entry in found])
    rows = [
        (f"[`{entry.name}`](#{anchor})", first_sentence(entry.member.docstring))
        for entry, anchor in zip(found, anchors, strict=True)
    ]
    parts = [HEAD, table(("Name", "Returns, or is"), rows), *map(_section, found), _errors(root)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _public(root: Path) -> Iterator[Entry]:
    """Yield the entries in the order of `__all__`, with the members of modules such as the oracle."""
    homes = exports(read(root, "ringlab"))
    shared = _aliases(read(root, "ringlab.types").tree)
    for name in [name for name in ringlab.__all__ if name in homes and name != "errors"]:
        if homes[name] == "ringlab":
            tree = read(root, f"ringlab.{name}").tree
            shown = [each for each in members.of(tree) if each.kind != "data"]
            yield from (Entry(f"{name}.{each.name}", each, {**shared, **_aliases(tree)}) for each in shown)
        else:
            tree = read(root, homes[name]).tree
            member = next(each for each in members.of(tree) if each.name == name)
            yield Entry(name, member, {**shared, **_aliases(tree)})


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Return the type aliases that a module defines."""
    return {
        ast.unparse(node.target): ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and node.value and "TypeAlias" in ast.unparse(node.annotation)
    }


def _anchors(names: list[str]) -> list[str]:
    """Return the anchors of headings; a repeated anchor gets a number."""
    plain = [name.lower().replace(".", "") for name in names]
    return [f"{each}-{plain[:n].count(each)}" if each in plain[:n] else each for n, each in enumerate(plain)]


def _section(entry: Entry) -> str:
    member = entry.member
    parts = [f"## {entry.name}", _signature(member.signature, entry.aliases), to_markdown(member.docstring)]
    for inner in member.inner:
        kind = next((text.removeprefix(":type: ") for text in inner.options if text.startswith(":type:")), "")
        signature = f"{inner.name}: {kind}" if kind else inner.signature
        parts += [
            f"### {entry.name}.{inner.name}",
            _signature(signature, entry.aliases),
            to_markdown(inner.docstring),
        ]
    return "\n\n".join(part for part in parts if part)


def _errors(root: Path) -> str:
    rows = [
        (f"`{each.name}`", first_sentence(each.docstring))
        for each in members.of(read(root, "ringlab.errors").tree)
        if each.kind == "exception"
    ]
    return f"{ERRORS}\n{table(('Error', 'Meaning'), rows)}"


def _signature(text: str, aliases: dict[str, str]) -> str:
    """Return a signature as a block of code; one that is too long for a line has a line per parameter."""
    text = re.sub(r"(?<=[\w\]\')])=(?=\S)", " = ", text) if ": " in text else text
    if len(text) > WIDTH:
        name, _, rest = text.partition("(")
        inside, _, returned = rest.rpartition(")")
        text = f"{name}(\n" + "".join(f"    {each},\n" for each in _split(inside)) + f"){returned}"
    used = [f"# {name} is {aliases[name]}" for name in aliases if re.search(rf"\b{name}\b", text)]
    return "\n".join(["```py", text, *used, "```"])


def _split(parameters: str) -> list[str]:
    """Return the parts between commas that are outside of all brackets and quotes."""
    parts, depth, quoted, begin = [], 0, False, 0
    for place, sign in enumerate(parameters):
        quoted ^= sign in "'\""
        depth += (sign in "[({") - (sign in "])}")
        if sign == "," and depth == 0 and not quoted:
            parts.append(parameters[begin:place].strip())
            begin = place + 1
    return [*parts, parameters[begin:].strip()]
