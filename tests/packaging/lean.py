"""A virtual environment that holds a wheel and exactly the packages that its base dependencies need.

They are links to this environment's own: nothing is downloaded, and no package of an extra can be imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the modules of this one that are not in it."""

    folder: Path
    site: Path
    hidden: frozenset[str]

    def run(self, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Return a program of the environment, run far from the checkout."""
        elsewhere = self.folder.parent / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        ours = ("PYTHON", "RINGLAB", "TRITON")  # what tests set for themselves
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(
            command,
            cwd=elsewhere,
            env={**inherited, "TERM": "dumb", **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed distributions that the requirements need, their own requirements included."""
    pending = [(Requirement(text), "") for text in requirements]
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement, of_extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                found[name] = importlib.metadata.distribution(name)
                pending += [(Requirement(text), extra) for text in found[name].requires or ()]
    return found


def make(folder: Path, wheel: Path, requirements: Iterable[str]) -> Environment:
    """Return a new environment in `folder` with the wheel and what the requirements need."""
    packages = closure(requirements)
    venv.EnvBuilder(symlinks=True).create(folder)
    command = [
        "--python",
        str(folder / "bin/python"),
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
    ]
    subprocess.run([sys.executable, "-m", "pip", *command, str(wheel)], check=True, capture_output=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for package in packages.values():
        for name in _top_level(package):
            (site / name).symlink_to(str(package.locate_file(name)))
    hidden = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & {*packages, "ringlab"}
    }
    stdlib = {
        *sys.stdlib_module_names,
        "test",
    }  # Python's own tests; some packages install theirs by that name
    return Environment(folder, site, frozenset(hidden - stdlib))


def _top_level(package: Distribution) -> set[str]:
    """Return the names of a distribution's files and folders in site-packages."""
    names = {file.parts[0] for file in package.files or ()}
    return {name for name in names if name not in ("..", "__pycache__") and not name.startswith("/")}
