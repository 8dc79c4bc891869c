"""pyproject.toml, requirements.lock and environment.yml agree, and the check for it can fail."""

from __future__ import annotations

import copy
import importlib.metadata
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.packaging import drift

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
LOCK = (CHECKOUT / "requirements.lock").read_text()
ENVIRONMENT = yaml.safe_load((CHECKOUT / "environment.yml").read_text())
Files = tuple[dict[str, Any], str, dict[str, Any]]


def files() -> Files:
    return copy.deepcopy(PROJECT), LOCK, copy.deepcopy(ENVIRONMENT)


def test_the_three_files_agree() -> None:
    assert drift.problems(*files()) == []


def in_project(change: Callable[[dict[str, Any]], object]) -> Callable[[Files], Files]:
    return lambda f: (change(f[0]), f)[1]


def in_lock(pattern: str, replacement: str) -> Callable[[Files], Files]:
    def change(f: Files) -> Files:
        edited, count = re.subn(pattern, replacement, f[1], flags=re.MULTILINE)
        assert count == 1
        return f[0], edited, f[2]

    return change


def in_environment(change: Callable[[list[Any]], object]) -> Callable[[Files], Files]:
    return lambda f: (change(f[2]["dependencies"]), f)[1]


DRIFTED = {
    "a new dependency is not locked": (
        in_project(lambda p: p["project"]["dependencies"].append("polars>=1.0")),
        "dependencies: polars is not in the lock",
    ),
    "a new test dependency is not locked": (
        in_project(lambda p: p["project"]["optional-dependencies"]["test"].append("pytest-cov")),
        "[test]: pytest-cov is not in the lock",
    ),
    "a bound moved past the lock": (
        in_project(lambda p: p["project"]["dependencies"].append("numpy>=99")),
        "dependencies: numpy>=99 contradicts the lock's numpy==",
    ),
    "the build backend is not locked": (
        in_project(lambda p: p["build-system"]["requires"].append("hatch-vcs")),
        "build-system: hatch-vcs is not in the lock",
    ),
    "the lock floats": (in_lock(r"^numpy==.*", "numpy>=2"), "numpy has no exact version"),
    "the lock has a wildcard": (in_lock(r"^numpy==.*", "numpy==2.*"), "numpy has no exact version"),
    "the lock names one build of torch": (in_lock(r"^(torch==.*)", r"\1+cpu"), "torch names a local build"),
    "the lock takes torch from a URL": (
        in_lock(r"^torch==.*", "torch @ https://example.org/t.whl"),
        "comes from a URL",
    ),
    "the lock names an index": (
        in_lock(r"\A", "--extra-index-url https://example.org\n"),
        "is no requirement",
    ),
    "the lock has hashes": (in_lock(r"^(torch==.*)", r"\1 --hash=sha256:00"), "is no requirement"),
    "the lock fetches CUDA": (
        in_lock(r"^(numpy==.*)", r"\1\nnvidia-nccl-cu13==2.29"),
        "nvidia-nccl-cu13 belongs to",
    ),
    "the lock wants triton on macOS": (in_lock(r"^(triton==[\d.]+).*", r"\1"), "triton has the marker None"),
    "the lock has a package twice": (in_lock(r"^(numpy==.*)", r"\1\n\1"), "numpy stands there twice"),
    "the lock is not sorted": (in_lock(r"^(numpy==.*)", r"zzz==1\n\1"), "is not sorted"),
    "torch left the lock": (in_lock(r"^torch==.*\n", ""), "dependencies: torch is not in the lock"),
    "conda has another Python": (
        in_environment(lambda d: d.__setitem__(0, "python>=3.10,<3.14")),
        "is not pyproject's >=3.11,<3.14",
    ),
    "conda ignores the lock": (
        in_environment(lambda d: d[-1]["pip"].remove("-c requirements.lock")),
        "versions float",
    ),
    "conda forgets ringlab": (
        in_environment(lambda d: d[-1]["pip"].remove("-e .[lab]")),
        "does not install ringlab",
    ),
    "conda installs the reference alone": (
        in_environment(lambda d: d[-1]["pip"].__setitem__(-1, "-e .[jax]")),
        "does not install [lab]",
    ),
    "an extra includes one that is not there": (
        in_project(lambda p: p["project"]["optional-dependencies"]["test"].append("ringlab[teacher]")),
        "[test]: pyproject.toml has no extra [teacher]",
    ),
    "conda has an unknown extra": (
        in_environment(lambda d: d[-1]["pip"].__setitem__(-1, "-e .[teacher]")),
        "no extra [teacher]",
    ),
    "conda has a package of its own": (
        in_environment(lambda d: d.append("einops")),
        "einops is not in pyproject.toml",
    ),
    "conda has another version": (in_environment(lambda d: d.append("numpy=1.26")), "numpy=1.26 contradicts"),
}


@pytest.mark.parametrize("name", DRIFTED)
def test_drift_is_noticed(name: str) -> None:
    change, message = DRIFTED[name]
    found = drift.problems(*change(files()))
    assert any(message in line for line in found), found


def test_the_lock_is_complete() -> None:
    """Everything that the installed packages ask for here is in the lock, in the installed version."""
    pins, _ = drift.parse_lock(LOCK)
    wrong = []
    for name, installed in sorted(installed_closure().items()):
        if name not in pins:
            wrong.append(f"{name} {installed} is needed and not locked: run `make lock`")
        elif Version(installed).public != next(iter(pins[name].specifier)).version:
            wrong.append(f"{name} {installed} is installed, {pins[name]} is locked: run tools/setup.sh")
    assert wrong == []


def installed_closure() -> dict[str, str]:
    """Return name and version of what ringlab[test,site] needs here, as installed."""
    pending: list[tuple[str, str]] = [("ringlab", extra) for extra in ("", "test", "site")]
    reached = set(pending)
    found: dict[str, str] = {}
    while pending:
        name, extra = pending.pop()
        distribution = importlib.metadata.distribution(name)
        found[name] = distribution.version
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needs = canonicalize_name(requirement.name)
                new = {(needs, e) for e in ("", *requirement.extras)} - reached
                if not needs.startswith(drift.OF_CUDA):
                    reached |= new
                    pending += new
    del found["ringlab"]
    return found


def names(*groups: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for texts in groups for text in texts}


def test_the_base_is_what_the_reference_needs() -> None:
    base = {"cloudpickle", "jaxtyping", "numpy", "rich", "torch", "triton", "typer"}
    assert names(PROJECT["project"]["dependencies"]) == base


def test_the_learners_install_is_lean() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for_others = {"pytest", "mypy", "ruff", "playwright", "nbval", "hypothesis", "beartype", "sphinx"}
    assert (
        "ringlab[figures]" in extras["lab"] and names(extras["lab"], extras["figures"]) & for_others == set()
    )
