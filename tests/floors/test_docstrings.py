"""Exported names have examples that run, methods have docstrings, functions have `Raises:` and axis types.

`make house` lists the names that lack any of these.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.house import docstrings
from tools.house.docstrings import CHECKOUT, KINDS

PACKAGE = docstrings.read()
MISSING = docstrings.missing(PACKAGE)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_missing(kind: str) -> None:
    assert MISSING[kind] == []


def test_the_package_was_read() -> None:
    names = {name.rpartition(".")[2] for name, _ in docstrings.exported(PACKAGE)}
    assert {
        "ring_attention",
        "zigzag",
        "Mask",
        "VirtualCluster",
        "TritonBlock",
        "train",
        "attention",
    } <= names
    assert (
        sum(1 for module in PACKAGE.modules.values() for _ in docstrings.public_functions(module.tree)) > 800
    )


MODULES = {
    "__init__": "from ringlab_demo.sound import kept as kept\nfrom ringlab_demo.sound import Thing as Thing\nfrom ringlab_demo import plain as plain",
    "plain": "def alone():\n    '''Return 1.'''\n    return 1",
    "sound": '''
from jaxtyping import Float

def kept(x: Float[Tensor, "B H"], *, y: "Float[np.ndarray, 'n'] | None" = None) -> Tensor:
    """Return x.

    Raises: ValueError if x is empty.

    >>> kept(1)
    1
    """
    _refuse(x)

def _refuse(x: Tensor) -> None:
    raise ValueError(x)

class Thing:
    """A thing."""

    def size(self) -> int:
        """Return its size.

        >>> Thing().size()
        0
        """

    def later(self) -> int:
        """Return it. """
        raise NotImplementedError

class Heavy(Thing):
    """A heavy thing."""

    def size(self) -> int:
        return 3
''',
}
SPOILED = {
    "examples": [("    >>> kept(1)\n    1\n", "kept"), ("        >>> Thing().size()\n        0\n", "Thing")],
    "methods": [('        """Return it. """\n', "Thing.later"), ("class Heavy(Thing):", "Heavy.size")],
    "raises": [("    Raises: ValueError if x is empty.\n", "kept")],
    "axes": [('Float[Tensor, "B H"]', "kept"), ("Float[np.ndarray, 'n']", "kept")],
}
INSTEAD = {
    "class Heavy(Thing):": "class Heavy:",
    'Float[Tensor, "B H"]': "Tensor",
    "Float[np.ndarray, 'n']": "np.ndarray",
}


def made_up(folder: Path, **changed: str) -> dict[str, list[str]]:
    (folder / "ringlab_demo").mkdir()
    for name, source in {**MODULES, **changed}.items():
        ast.parse(source)
        (folder / "ringlab_demo" / f"{name}.py").write_text(source)
    return docstrings.missing(docstrings.read(folder, "ringlab_demo"))


def test_a_sound_module_lacks_nothing(tmp_path: Path) -> None:
    assert made_up(tmp_path) == {
        "examples": ["ringlab_demo.plain.alone"],
        "methods": [],
        "raises": [],
        "axes": [],
    }


@pytest.mark.parametrize(
    "kind, old, name", [(kind, old, name) for kind, cases in SPOILED.items() for old, name in cases]
)
def test_what_is_taken_away_is_missed(tmp_path: Path, kind: str, old: str, name: str) -> None:
    assert MODULES["sound"].count(old) == 1
    found = made_up(tmp_path, sound=MODULES["sound"].replace(old, INSTEAD.get(old, "")))
    assert f"ringlab_demo.sound.{name}" in found[kind]


PATIENCE = 20.0
"""Seconds of processor time; an example takes one at most."""


def examples(root: Path = CHECKOUT / "ringlab") -> Iterator[tuple[str, str, str]]:
    """Yield (module, name, docstring) of each docstring with an example."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ">>> " in text:
            parts = path.relative_to(root.parent).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield from ((module, name, said) for name, said in documented(text) if ">>> " in said)


def documented(source: str) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of a module and of each of its classes and functions.

    The docstrings are parsed from the source, not from the imported module, because the shape checks wrap
    functions during tests and doctest would overlook wrapped functions.
    """
    inside: list[tuple[str, ast.AST]] = [("module", ast.parse(source))]
    for prefix, node in inside:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix, ast.get_docstring(node) or ""
        for child in ast.iter_child_nodes(node):
            inside.append((getattr(child, "name", prefix), child))


def failures(module: str, name: str, docstring: str) -> str:
    """Run the examples of a docstring; return the report of doctest about the examples that fail."""
    said: list[str] = []
    names = vars(importlib.import_module(module)).copy()
    test = doctest.DocTestParser().get_doctest(docstring, names, f"{module}.{name}", module, 0)
    doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    return "".join(said)


CASES = [
    pytest.param(*case, id=f"{case[0]}.{case[1]}", marks=[pytest.mark.needs_triton] * ("triton" in case[0]))
    for case in examples()
]


@pytest.mark.parametrize("module, name, docstring", CASES)
def test_an_example_prints_what_it_says(module: str, name: str, docstring: str) -> None:
    begin = time.process_time()
    assert failures(module, name, docstring) == ""
    assert time.process_time() - begin < PATIENCE


def test_no_example_is_overlooked() -> None:
    written = sum(
        path.read_text(encoding="utf-8").count(">>> ") for path in (CHECKOUT / "ringlab").rglob("*.py")
    )
    assert sum(docstring.count(">>> ") for _, _, docstring in examples()) == written >= 5


def test_a_wrong_example_is_caught() -> None:
    assert "Expected:" in failures("ringlab.errors", "made_up", ">>> 1 + 1\n3\n")
    assert "NameError" in failures("ringlab.errors", "made_up", ">>> nonesuch\n3\n")
