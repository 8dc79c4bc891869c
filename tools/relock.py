"""Choose exact versions for every package that ringlab needs, and write requirements.lock.

    python tools/relock.py            choose the newest versions that fit
    python tools/relock.py --keep     keep the versions that the lock already has, where they still fit

pip resolves on this machine; what only other supported machines need (another Python, macOS) is found
from the packages' own metadata and resolved too. The lock holds no local version such as +cpu and no
package of CUDA's: the pip configuration of a machine decides which build of torch comes, and that
build brings its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

CHECKOUT = Path(__file__).resolve().parent.parent
LOCK = CHECKOUT / "requirements.lock"
PINNED = ("torch==2.13.0", "triton==3.7.1")  # PyPI's build of this torch asks for exactly this triton
OLDEST = "3.11.0"
OF_CUDA = ("nvidia-", "cuda-")
LINUX_X86 = 'sys_platform == "linux" and platform_machine == "x86_64"'
HEADER = """\
# Exact versions of everything that ringlab and all its extras install, and of the build backend.
# Used as constraints: pip install -c requirements.lock -e '.[lab]'
# Written by tools/relock.py; edit pyproject.toml and run `make lock` instead.
"""


def environments() -> list[dict[str, str]]:
    """Return the marker environments of every machine that is supported."""
    machines = [
        {
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
            "os_name": "posix",
        },
        {
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": "aarch64",
            "os_name": "posix",
        },
        {
            "sys_platform": "darwin",
            "platform_system": "Darwin",
            "platform_machine": "arm64",
            "os_name": "posix",
        },
    ]
    pythons = [{"python_version": v, "python_full_version": f"{v}.0"} for v in ("3.11", "3.12", "3.13")]
    here = {name: str(value) for name, value in default_environment().items()}
    return [{**here, **machine, **python} for machine in machines for python in pythons]


def direct_requirements() -> list[Requirement]:
    """Return what pyproject.toml asks for: dependencies, all extras and the build backend."""
    document = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    project = document["project"]
    texts = [*project["dependencies"], *document["build-system"]["requires"], "editables"]
    for of_extra in project["optional-dependencies"].values():
        texts += of_extra
    requirements = [Requirement(text) for text in texts]
    return [each for each in requirements if each.name != project["name"]]  # an extra that includes another


def resolve(requirements: Iterable[str], constraints: Path | None) -> dict[str, dict[str, Any]]:
    """Return the metadata of the packages pip would install, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        # The oldest supported Python decides; pip lets one name it only for wheels into a folder.
        command += ["--python-version", OLDEST, "--only-binary", ":all:", "--target", folder]
        command += ["--report", str(report), *requirements]
        if constraints is not None:
            command += ["-c", str(constraints)]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text())["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in found}


def needed(
    direct: list[Requirement], packages: dict[str, dict[str, Any]], environment: dict[str, str]
) -> set[str]:
    """Return the names that `environment` needs, following the packages' own requirements."""
    reached: set[tuple[str, str]] = set()
    pending = [(requirement, "") for requirement in direct]
    while pending:
        requirement, extra = pending.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        if name.startswith(OF_CUDA):
            continue
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in reached:
                reached.add((name, wanted))
                texts = packages.get(name, {}).get("requires_dist", [])
                pending += [(Requirement(text), wanted) for text in texts]
    return {name for name, _ in reached}


def check_pythons(packages: dict[str, dict[str, Any]]) -> None:
    """Raise SystemExit if a chosen version does not run on every supported Python."""
    for name, metadata in packages.items():
        allowed = Requirement(f"python {metadata.get('requires_python') or ''}").specifier
        refused = [v for v in (OLDEST, "3.12.0", "3.13.0") if not allowed.contains(v)]
        if refused:
            raise SystemExit(
                f"{name} {metadata['version']} needs Python {allowed}, not {refused}: bound it in pyproject.toml"
            )


def choose(keep: bool) -> dict[str, dict[str, Any]]:
    """Return the metadata of every package to lock."""
    direct = direct_requirements()
    wanted: dict[str, Requirement] = {canonicalize_name(r.name): r for r in direct}
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(LOCK.read_text() if keep and LOCK.exists() else "\n".join(PINNED))
        packages = resolve(map(str, direct), constraints)
        for _ in range(5):
            missing = (
                set[str]().union(*(needed(direct, packages, e) for e in environments())) - packages.keys()
            )
            if not missing:
                break
            pins = [f"{name}=={public(metadata)}" for name, metadata in packages.items()]
            constraints.write_text("\n".join(pins))
            texts = (
                f"{r.name}{r.specifier}" if (r := wanted.get(name)) else name for name in sorted(missing)
            )
            packages |= resolve([*texts], constraints)
    union = set[str]().union(*(needed(direct, packages, e) for e in environments()))
    return {name: packages[name] for name in sorted(union)}


def public(metadata: dict[str, Any]) -> str:
    """Return the version without its local part, so that 2.13.0+cpu locks 2.13.0 of any build."""
    return Version(metadata["version"]).public


def render(packages: dict[str, dict[str, Any]]) -> str:
    """Return the text of the lock."""
    lines = []
    for name, metadata in packages.items():
        marker = f"; {LINUX_X86}" if name == "triton" else ""
        lines.append(f"{re.sub('[-_.]+', '-', name)}=={public(metadata)}{marker}")
    return HEADER + "\n".join(lines) + "\n"


def main() -> None:
    """Write the lock and say what changed."""
    before = set(LOCK.read_text().splitlines()) if LOCK.exists() else set()
    packages = choose(keep="--keep" in sys.argv[1:])
    check_pythons(packages)
    text = render(packages)
    LOCK.write_text(text)
    after = set(text.splitlines())
    for sign, lines in (("-", before - after), ("+", after - before)):
        for line in sorted(lines):
            print(sign, line)
    print(f"{len(packages)} packages locked in {LOCK.name}")


if __name__ == "__main__":
    main()
