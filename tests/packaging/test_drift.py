"""pyproject.toml, requirements.lock, environment.yml and the installed packages agree."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
PINS = {
    canonicalize_name(pin.name): pin
    for line in (CHECKOUT / "requirements.lock").read_text().splitlines()
    if not line.startswith("#")
    for pin in [Requirement(line)]
}
ENVIRONMENT = yaml.safe_load((CHECKOUT / "environment.yml").read_text())
OF_CUDA = ("nvidia-", "cuda-")
FOR_GPUS = {"flash", "flash4"}
"""Extras that need CUDA. The lock, which fits every machine, does not have them."""


def asked_for() -> Iterator[Requirement]:
    """Yield every requirement of pyproject.toml, except extras that include other extras of ringlab."""
    extras = [group for name, group in EXTRAS.items() if name not in FOR_GPUS]
    groups = [PROJECT["build-system"]["requires"], PROJECT["project"]["dependencies"], *extras]
    for text in (text for group in groups for text in group):
        requirement = Requirement(text)
        if requirement.name == "ringlab":
            assert requirement.extras <= EXTRAS.keys(), f"{text}: pip would skip an extra that is not there"
        else:
            yield requirement


def version_of(pin: Requirement) -> str:
    """Return the one version that a pin allows."""
    found = re.fullmatch(r"==([^*]+)", str(pin.specifier))
    assert found is not None and pin.url is None, f"{pin} is no exact version"
    return found[1]


def test_the_lock_has_one_version_of_all_that_is_asked_for() -> None:
    wrong = [
        f"{requirement}, but the lock has {PINS.get(canonicalize_name(requirement.name))}"
        for requirement in asked_for()
        if (pin := PINS.get(canonicalize_name(requirement.name))) is None
        or not requirement.specifier.contains(version_of(pin), prereleases=True)
    ]
    assert wrong == []


def test_the_lock_fits_every_machine() -> None:
    """The lock has no build for one kind of machine, such as torch's +cpu, and no package of CUDA builds."""
    for name, pin in PINS.items():
        assert Version(version_of(pin)).local is None, pin
        assert not name.startswith(OF_CUDA), pin


def test_conda_installs_the_learners_extra_with_the_lock() -> None:
    python, *others, of_pip = ENVIRONMENT["dependencies"]
    assert SpecifierSet(python.removeprefix("python")) == SpecifierSet(PROJECT["project"]["requires-python"])
    assert others == ["pip"] and of_pip == {"pip": ["-c requirements.lock", "-e .[lab]"]}


def test_the_lock_is_complete() -> None:
    """All packages that the installed packages require here are in the lock, in the installed version."""
    wrong = []
    for name, installed in sorted(installed_closure().items()):
        if name not in PINS:
            wrong.append(f"{name} {installed} is needed and not locked: run `make lock`")
        elif Version(installed).public != version_of(PINS[name]):
            wrong.append(f"{name} {installed} is installed, {PINS[name]} is locked: run tools/setup.sh")
    assert wrong == []


def installed_closure() -> dict[str, str]:
    """Return the names and versions of the installed packages that ringlab[test,site] needs here."""
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
                if not needs.startswith(OF_CUDA):
                    reached |= new
                    pending += new
    del found["ringlab"]
    return found


def test_the_learners_install_is_lean() -> None:
    for_others = {"pytest", "mypy", "ruff", "playwright", "nbval", "hypothesis", "beartype", "sphinx"}
    assert {Requirement(text).name for text in (*EXTRAS["lab"], *EXTRAS["figures"])} & for_others == set()
