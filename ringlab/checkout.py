"""The folder of the project's checkout, for code that reads its sources or its committed results."""

from __future__ import annotations

from pathlib import Path

from ringlab.errors import RinglabError

_MARKS = ("notebooks", "benchmarks", "pyproject.toml")


def find_checkout() -> Path:
    """Return the checkout that contains the current folder, or else the checkout that contains this file.

    Raises: RinglabError if there is none, as after `pip install ringlab`.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[1]):
        if all((folder / mark).exists() for mark in _MARKS):
            return folder
    raise RinglabError("a checkout of ringlab", str(here), "clone the repository and run this inside it")
