"""Do pyproject.toml, requirements.lock and environment.yml still say the same?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

OF_CUDA = ("nvidia-", "cuda-")
LINUX_ONLY = {"triton": 'sys_platform == "linux" and platform_machine == "x86_64"'}
LOCK = "requirements.lock"


def problems(project: dict[str, Any], lock: str, environment: dict[str, Any]) -> list[str]:
    """Return a line for each way in which the three files contradict each other or their own rules."""
    pins, faults = parse_lock(lock)
    faults += list(_unlocked(project, pins))
    faults += list(_of_extras(project["project"]))
    faults += list(_of_environment(project, pins, environment))
    return faults


def requirements(project: dict[str, Any]) -> Iterator[tuple[str, Requirement]]:
    """Yield (where it stands, requirement) for all that pyproject.toml asks for of others."""
    for text in project["build-system"]["requires"]:
        yield "build-system", Requirement(text)
    for text in project["project"]["dependencies"]:
        yield "dependencies", Requirement(text)
    for extra, texts in project["project"]["optional-dependencies"].items():
        of_others = (r for r in map(Requirement, texts) if r.name != project["project"]["name"])
        yield from ((f"[{extra}]", requirement) for requirement in of_others)


def parse_lock(text: str) -> tuple[dict[str, Requirement], list[str]]:
    """Return the pins by name, and what is wrong with the lock by itself."""
    pins: dict[str, Requirement] = {}
    faults = []
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    for line in lines:
        try:
            pin = Requirement(line)
        except InvalidRequirement:
            faults.append(
                f"lock: {line!r} is no requirement; index URLs and options belong to a machine's pip"
            )
            continue
        name = canonicalize_name(pin.name)
        if name in pins:
            faults.append(f"lock: {name} stands there twice")
        pins[name] = pin
        faults += [f"lock: {name} {fault}" for fault in _of_pin(name, pin)]
    if lines != sorted(lines, key=lambda line: re.split("[=;]", line)[0]):
        faults.append("lock: is not sorted")
    return pins, faults


def _of_pin(name: str, pin: Requirement) -> Iterator[str]:
    exact = re.fullmatch(r"==([^*]+)", str(pin.specifier))
    if pin.url:
        yield "comes from a URL"
    elif exact is None:
        yield f"has no exact version: {pin}"
    elif Version(exact[1]).local:
        yield f"names a local build, {exact[1]}: another machine has another"
    if name.startswith(OF_CUDA):
        yield "belongs to one build of torch: a machine with the CPU's build must not fetch it"
    if str(pin.marker or "") != LINUX_ONLY.get(name, ""):
        yield f"has the marker {pin.marker}, not {LINUX_ONLY.get(name)}"


def _unlocked(project: dict[str, Any], pins: dict[str, Requirement]) -> Iterator[str]:
    for where, requirement in requirements(project):
        name = canonicalize_name(requirement.name)
        if name not in pins:
            yield f"{where}: {name} is not in the lock"
        elif not requirement.specifier.contains(_version(pins[name]), prereleases=True):
            yield f"{where}: {requirement} contradicts the lock's {pins[name]}"


def _of_extras(project: dict[str, Any]) -> Iterator[str]:
    """An extra may include others by name; pip skips a name that is no extra, with a warning at most."""
    extras = project["optional-dependencies"]
    for extra, texts in extras.items():
        included = {e for r in map(Requirement, texts) if r.name == project["name"] for e in r.extras}
        for name in sorted(included - extras.keys()):
            yield f"[{extra}]: pyproject.toml has no extra [{name}]"


def _of_environment(
    project: dict[str, Any], pins: dict[str, Requirement], environment: dict[str, Any]
) -> Iterator[str]:
    named = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    of_pip = [
        line for entry in environment["dependencies"] if isinstance(entry, dict) for line in entry["pip"]
    ]
    pythons = [entry.removeprefix("python") for entry in named if re.match(r"python\b", entry)]
    if [SpecifierSet(p) for p in pythons] != [SpecifierSet(project["project"]["requires-python"])]:
        yield f"environment.yml: python{pythons} is not pyproject's {project['project']['requires-python']}"
    if f"-c {LOCK}" not in of_pip:
        yield f"environment.yml: pip runs without -c {LOCK}, so versions float"
    yield from _of_install(project, of_pip)
    others = [entry for entry in named if not re.match(r"(python|pip)\b", entry)]
    others += [line for line in of_pip if not line.startswith("-")]
    for text in others:
        requirement = Requirement(re.sub(r"(?<![<>=!~])=(?!=)", "==", text))  # conda writes name=1.2
        name = canonicalize_name(requirement.name)
        if name not in {canonicalize_name(r.name) for _, r in requirements(project)}:
            yield f"environment.yml: {name} is not in pyproject.toml"
        elif not requirement.specifier.contains(_version(pins[name]), prereleases=True):
            yield f"environment.yml: {text} contradicts the lock's {pins[name]}"


def _of_install(project: dict[str, Any], of_pip: list[str]) -> Iterator[str]:
    installs = [m for line in of_pip if (m := re.fullmatch(r"-e \.(?:\[([\w,-]+)\])?", line))]
    if len(installs) != 1:
        yield "environment.yml: does not install ringlab itself, once, with -e ."
    extras = {extra for m in installs for extra in (m[1] or "").split(",") if extra}
    if "lab" not in extras:
        yield "environment.yml: does not install [lab], which a learner needs"
    for extra in sorted(extras - project["project"]["optional-dependencies"].keys()):
        yield f"environment.yml: pyproject.toml has no extra [{extra}]"


def _version(pin: Requirement) -> str:
    """The locked version; 0, which contradicts every bound, where a faulty pin has none."""
    return next((specifier.version for specifier in pin.specifier), "0")
