"""The API reference, read from the package's source without importing the package.

If a package says which names are public (`__all__`, or `import x as x`), the reference describes those.
Otherwise it describes every module of the package, with all names without a leading underscore.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import members, source
from .docstrings import first_sentence, to_markdown
from .links import escape, table, toctree
from .members import spelled_out

ROOMS = (
    ("ringlab", "ring_attention, layouts, plans, the merge and the oracle"),
    ("ringlab.comm", "ranks and messages: the protocol, the ring, traces, memory"),
    ("ringlab.comm.virtual", "ranks that take turns in one process"),
    ("ringlab.comm.processes", "ranks that are processes: launched here, or by torchrun"),
    ("ringlab.comm.wrappers", "wrappers of a transport: traces, faults, strict rules"),
    ("ringlab.comm.clocked", "ranks that run for their timing only"),
    ("ringlab.blocks", "attention of one query block on one K/V block"),
    ("ringlab.blocks.triton", "a whole ring step in one launch"),
    (
        "ringlab.schedules",
        "how the ranks' tokens meet: ring, all-gather, Ulysses, hybrid, double ring; decode",
    ),
    ("ringlab.packing", "packed batches as collators make them, to layouts, masks and shards, and back"),
    ("ringlab.scan", "linear attention and the gated delta rule by a scan of states over ranks"),
    ("ringlab.serving", "prefill, decode and paged caches of a sharded context, as a server calls them"),
    ("ringlab.nn", "a small transformer over the ring, its loss, training and checkpoints"),
    ("ringlab.hf", "models of Hugging Face transformers over the ring"),
    ("ringlab.cost", "FLOPs, bytes, memory and time, without running anything"),
    ("ringlab.cost.planner", "does a context fit on a cluster"),
    ("ringlab.conformance", "checks for anybody's ring attention"),
    ("ringlab_course", "what lessons and exercises call"),
    ("ringlab_course.judge", "grading in a sandbox"),
    ("ringlab.viz", "pictures and widgets"),
)
"""Packages that a reader of the course may want to use, and what each is for."""

_FIRST = ("attention", "layout", "plan", "merge", "oracle", "types", "errors", "plain_ring")
"""The modules of ringlab that come first, in this order; others with public names follow, then those without."""

_INTRO = """\
# The package, name by name

Made from the docstrings of ringlab {version}. Axis letters in annotations and text are those of
[the legend](ringlab.md): B batch, H query heads, K key/value heads, S and L tokens of all ranks and of one, D head dim,
P ranks.

## What `from ringlab import …` gives

{names}

## Packages

{rooms}
"""


@dataclass(frozen=True)
class Module:
    """A module's source: its dotted name, and its syntax tree."""

    name: str
    tree: ast.Module

    @property
    def docstring(self) -> str:
        """The module's docstring, cleaned, or "" if there is none."""
        return ast.get_docstring(self.tree) or ""


def pages(root: Path, repository: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, text) for the index page, and for a page for each of ROOMS.

    repository: its address, if known, to which entries link for their source.
    """
    everything = frozenset(_full_names(root))
    rooms = [(f"[{name}]({name}.md)", escape(purpose)) for name, purpose in ROOMS]
    named = [
        (f"[`{name}`](#{_anchor(root, home, name)})", first_sentence(_docstring_of(root, home, name)))
        for name, home in sorted(exports(read(root, "ringlab")).items())
    ]
    version = next(
        ast.literal_eval(node.value)
        for node in read(root, "ringlab").tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )
    index = _INTRO.format(
        version=version,
        names=table(("Name", "Returns, or is"), named),
        rooms=table(("Package", "For"), rooms),
    )
    yield "api/index", index + "\n" + toctree([f"/api/{name}" for name, _ in ROOMS])
    for name, _ in ROOMS:
        yield f"api/{name}", _page(root, name, everything, repository)


def described(root: Path) -> dict[str, Path]:
    """Return the file of every module with an entry in the reference, by the module's name."""
    every = (part for name, _ in ROOMS for part in _contents(root, name))
    return {module.name: _file(root, module.name) for module, wanted in every if _members(module, wanted)}


def read(root: Path, name: str) -> Module:
    """Return the module or package called `name` in the checkout at `root`."""
    return Module(name, ast.parse(_file(root, name).read_text(encoding="utf-8")))


def _file(root: Path, name: str) -> Path:
    path = root.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exports(package: Module) -> dict[str, str]:
    """Return the names that a package makes public, each with the module that defines the name."""
    listed = _listed(package)
    found = {}
    for node in ast.walk(package.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringlab"):
            for alias in node.names:
                if alias.asname == alias.name or alias.name in listed:
                    found[alias.name] = node.module or ""
    return {name: home for name, home in found.items() if not name.startswith("_")}


def _listed(package: Module) -> set[str]:
    """Return the strings in `__all__`."""
    for node in package.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {
                n.value
                for n in ast.walk(node.value)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
    return set()


def _modules(root: Path, package: str) -> list[Module]:
    folder = root.joinpath(*package.split("."))
    stems = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    first = [stem for stem in _FIRST if stem in stems and package == "ringlab"]
    homes = {*exports(read(root, package)).values()}
    others = sorted(stems - {*first}, key=lambda stem: (f"{package}.{stem}" not in homes, stem))
    return [read(root, f"{package}.{stem}") for stem in (*first, *others)]


def _is_module(root: Path, home: str, name: str) -> bool:
    return root.joinpath(*home.split("."), f"{name}.py").exists()


def _anchor(root: Path, home: str, name: str) -> str:
    return f"module-{home}.{name}" if _is_module(root, home, name) else f"{home}.{name}"


def _docstring_of(root: Path, home: str, name: str) -> str:
    if _is_module(root, home, name):
        return read(root, f"{home}.{name}").docstring
    return next(m.docstring for m in members.of(read(root, home).tree) if m.name == name)


def _contents(root: Path, name: str) -> list[tuple[Module, set[str] | None]]:
    """Return the modules of a package's page, each with its public names, or None for all names."""
    package = read(root, name)
    named = {} if name == "ringlab" else exports(package)
    if named:
        whole = [f"{home}.{each}" for each, home in named.items() if _is_module(root, home, each)]
        homes = dict.fromkeys(home for each, home in named.items() if not _is_module(root, home, each))
        parts = [(read(root, home), {n for n, h in named.items() if h == home}) for home in homes]
        return [*parts, *((read(root, module), None) for module in whole)]
    return [(package, None), *((module, None) for module in _modules(root, name))]


def _members(module: Module, wanted: set[str] | None) -> list[members.Member]:
    return [member for member in members.of(module.tree) if wanted is None or member.name in wanted]


def _full_names(root: Path) -> Iterator[str]:
    """Yield the full names of everything that the reference describes."""
    for name, _ in ROOMS:
        for module, wanted in _contents(root, name):
            yield from (f"{module.name}.{member.name}" for member in _members(module, wanted))


def _page(root: Path, name: str, everything: frozenset[str], repository: str) -> str:
    """Return a package's page: a table of its names or, if it has several modules, of these, and all entries."""
    parts, own, modules = [], [], []
    for module, wanted in _contents(root, name):
        spelled_out(module.name, module.tree, everything)
        found = _members(module, wanted)
        file = _file(root, module.name).relative_to(root).as_posix()
        entries = [
            members.render(each, module.name, source.link(module.name, each.line, file, repository))
            for each in found
        ]
        rows = [
            (f"[`{each.name}`](#{module.name}.{each.name})", first_sentence(each.docstring)) for each in found
        ]
        if wanted is None and module.name != name and (entries or module.name == "ringlab.types"):
            short = module.name.removeprefix(f"{name}.")
            modules.append((f"[`{short}`](#module-{module.name})", first_sentence(module.docstring)))
            parts += [f"(module-{module.name})=\n## {module.name}", to_markdown(module.docstring)]
            parts += [table(("Name", "Returns, or is"), rows)] if len(rows) > 1 else []
        else:
            own += rows
        parts += entries
    tables = [
        table(head, rows)
        for head, rows in ((("Name", "Returns, or is"), own), (("Module", "What it is"), modules))
        if rows
    ]
    return "\n\n".join([f"# {name}", to_markdown(read(root, name).docstring), *tables, *parts]) + "\n"
