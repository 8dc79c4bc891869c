"""The version of an exercise's checks, and the seed of a submission's probes: what a result depends on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import ringlab.course.contracts

_IMPORT = re.compile(
    r"^\s*from ringlab\.course\.contracts(?:\.(\w+))? import (?:\(([^)]*)\)|(.*))", re.MULTILINE
)
"""Reading the sources as Python would take too long: this is done for every submission."""


def contract_version(exercise: str, *, unsafe: bool = False) -> str:
    """Return what changes when the checks of `exercise` do: their sources, and what these take from other
    exercises' checks. "" for no exercise.

    Results without a sandbox have another version: they are graded again where there is one.
    """
    digest = hashlib.sha256()
    for folder in ringlab.course.contracts.__path__:
        for path in _sources(Path(folder), exercise) if exercise else ():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return (f"{exercise}-{digest.hexdigest()[:16]}" if exercise else "") + ("+unsafe" if unsafe else "")


def _sources(folder: Path, exercise: str) -> list[Path]:
    """The files of an exercise's checks, and all that they import of `folder`, by name."""
    found: set[Path] = set()
    waiting = list(folder.glob(f"e{exercise}*.py"))
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file():
            found.add(path)
            waiting += (folder / f"{name}.py" for name in _imported(path.read_text(encoding="utf-8")))
    return sorted(found)


def _imported(source: str) -> Iterator[str]:
    """Yield the names of modules that may be meant by what a contract's source imports from beside it."""
    for module, several, names in _IMPORT.findall(source):
        yield from [module] if module else re.findall(r"\w+", several or names)


def seed_of(class_seed: int, learner: str, exercise: str, digest: str) -> int:
    """Return the seed of the probes for one submission, 64 bits: the same whenever this file is graded.

    A changed notebook, which has another digest, is met by new probes: what an earlier one saw is of no use to it.
    """
    text = "\0".join((str(class_seed), learner, exercise, digest))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
