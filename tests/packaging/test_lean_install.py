"""With the wheel installed without extras, the reference works, and other commands name the extra they need."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
RUNNER = Path(__file__).with_name("run_in_lean.py")

OF_THE_LAB = ("IPython", "ipykernel", "ipywidgets", "jupyterlab", "jupytext", "matplotlib", "nbformat")
WATCHED = ("ringlab_course", *OF_THE_LAB)
"""Modules that no command of the reference may try to import, even if it works without them."""
ASK_THE_COURSE = ("doctor --json", "--help", "grade notebook.ipynb --unsafe")
"""Commands that may try to import the course: its own, and those that report about it."""
TINY = "--tokens 64 --heads 1 --head-dim 16 --ranks 2 --pairs 1"
REFERENCE = {
    "plan --model llama3-70b --tokens 1M --hardware h100 --nodes 8 --logits-chunk 4Ki": 0,
    "simulate --tokens 4096 --ranks 2 --perfetto events.json": 0,
    "kernels": 0,
    "check ringlab.conformance.self_targets:ring --quick --only scale --layouts contiguous --ranks 2": 0,
    "verify --quick": 0,
    f"bench emulate {TINY}": 0,
    f"bench processes {TINY}": 0,
    "bench answers --runs 1": 0,
    "bench ring --emulated 2 --tokens 256 --heads 1 --rounds 1": 1,
    "doctor --json": 0,
    "--help": 0,
    "grade notebook.ipynb --unsafe": 1,
}
"""Commands and their exit statuses; `bench ring` says that it needs a GPU, `grade` that the course is missing."""
FEW_CASES = """
from ringlab.conformance import verify
quick = verify.jobs(quick=True)
verify.jobs = lambda _: [job for job in quick if job.case.P == 2][::40]
"""
"""Code that reduces `verify --quick`, which takes most of a minute, to one case of each transport."""

COURSE = ("grade 01_naive_attention.ipynb --unsafe", "exercise list")
"""Commands of the course that run on the base install, which is all that a cluster's machines need to grade."""
NEED_AN_EXTRA = {
    "simulate --tokens 4096 --ranks 2 --png timeline.png": "figures",
    "bench draw result.json": "figures",
    "build": "lab",
    "exercise fresh 05": "lab",
    "progress": "lab",
    "grade notebook.ipynb --unsafe --scheduler tcp://127.0.0.1:9": "cluster",
    "grade notebook.ipynb --unsafe --html pages": "instructor",
    "gradebook report class.db pages": "instructor",
    "lab report result.json": "instructor",
    "nbgrader config": "nbgrader",
}
FILES = """
from pathlib import Path
from ringlab_course.gradebook.store import Gradebook
Path("notebook.ipynb").write_text("{}")
Path("result.json").write_text('{"bench": "kernels"}')
with Gradebook(Path("class.db")):
    pass
"""
CALLS_NEED_AN_EXTRA = {
    "import ringlab.hf": "hf",
    "from ringlab.viz import style; style.styled().__enter__()": "figures",
    "from ringlab_course.figures import layout_view; layout_view.player()": "lab",
    "from ringlab.viz import gantt; gantt.live('a run').__enter__()": "lab",
    "import ringlab_course; ringlab_course.hint('01.attention')": "lab",
    "import ringlab_course; ringlab_course.predict('key', 'How many?', answer=1)": "lab",
}
NEED_MORE = {"ringlab.hf": "hf", "ringlab.conformance.plugin": "test", "ringlab.__main__": ""}
"""Modules that the base cannot import, with their extra. The last one would run the command line."""

Ended = dict[str, Any]


@dataclass(frozen=True)
class Environment:
    """A virtual environment with a wheel and its base dependencies, and the modules that it lacks.

    The packages are links to this environment's own packages. So nothing is downloaded, and no package of an
    extra can be imported.
    """

    folder: Path
    site: Path
    hidden: frozenset[str]

    def run(self, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment outside the checkout, and return the finished process."""
        elsewhere = self.folder.parent / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        # Prefixes of variables that the test run sets for its own processes.
        ours = ("PYTHON", "RINGLAB", "TRITON")
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
    """Return the installed distributions that the requirements need, directly or indirectly."""
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
    """Return a new environment in `folder` with the wheel and the packages that the requirements need."""
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
    }  # Python's own tests; some packages install theirs under the same name
    return Environment(folder, site, frozenset(hidden - stdlib))


def _top_level(package: Distribution) -> set[str]:
    """Return the names of a distribution's files and folders in site-packages."""
    names = {file.parts[0] for file in package.files or ()}
    return {name for name in names if name not in ("..", "__pycache__") and not name.startswith("/")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel without downloads, from a copy, so that the checkout stays unchanged."""
    folder = tmp_path_factory.mktemp("a wheel with spaces")
    copy = folder / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "LICENSE-text"):
        shutil.copy(CHECKOUT / name, copy)
    for package in ("ringlab", "ringlab_course"):
        shutil.copytree(CHECKOUT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    command = [sys.executable, "-m", "pip", "wheel", *options, str(copy)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.parametrize("package", ["ringlab", "ringlab_course"])
def test_the_wheel_holds_every_file_of_the_package(wheel: Path, package: str) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    files = (path for path in (CHECKOUT / package).rglob("*") if path.is_file())
    wanted = {path.relative_to(CHECKOUT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert {name for name in names if name.startswith(f"{package}/")} == wanted
    assert "ringlab/py.typed" in names


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode()
    assert "License-Expression: Apache-2.0 AND CC-BY-4.0" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata
    folder = name.removesuffix("METADATA")
    assert "ringlab = ringlab.cli:main" in archive.read(folder + "entry_points.txt").decode()
    assert {folder + "licenses/LICENSE", folder + "licenses/LICENSE-text"} <= set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make(tmp_path_factory.mktemp("lean") / "venv", wheel, PROJECT["dependencies"])


def run(
    installed: Environment, lines: list[str], refused: tuple[str, ...], setup: str, **variables: str
) -> dict[str, Ended]:
    """Return the result of each command in a Python that cannot import the refused modules."""
    file = installed.folder.parent / "commands.json"
    commands = [line.split() for line in lines]
    asked = {"refused": refused, "watched": WATCHED, "setup": setup, "commands": commands}
    file.write_text(json.dumps(asked))
    done = installed.run("python", str(RUNNER), str(file), **variables)
    assert done.returncode == 0, done.stderr
    return {ended["command"]: ended for ended in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def reference(installed: Environment) -> dict[str, Ended]:
    return run(installed, list(REFERENCE), ("ringlab_course",), FEW_CASES)


def faults(ended: Ended, status: int) -> list[str]:
    """Return a line for each way in which a command of the reference fails without extras."""
    found = []
    if ended["status"] != status:
        found.append(f"status {ended['status']}: {ended['stderr']}")
    if "ModuleNotFoundError" in ended["stderr"]:
        found.append(ended["stderr"].strip().splitlines()[-1])
    if ended["command"] not in ASK_THE_COURSE:
        found += [f"asks for {name}" for name in ended["asked"]]
    return found


@pytest.mark.parametrize("line", REFERENCE)
def test_a_command_of_the_reference_runs(reference: dict[str, Ended], line: str) -> None:
    """A command of the reference runs even if the course cannot be imported."""
    assert faults(reference[line], REFERENCE[line]) == []


def test_doctor_calls_nothing_broken_and_names_the_extras(reference: dict[str, Ended]) -> None:
    found = json.loads(reference["doctor --json"]["stdout"])
    checks = {check["name"]: check for check in found["checks"]}
    assert found["ok"] and {check["state"] for check in checks.values()} <= {"ok", "missing"}
    for name, extra in (("fonts", "figures"), ("transformers", "hf"), ("peers", "peers")):
        assert checks[name]["state"] == "missing" and f"'ringlab[{extra}]'" in checks[name]["remedy"]
    assert "No module named 'ringlab_course'" in checks["probes of the course"]["found"]


def test_a_command_of_the_missing_course_says_so_in_one_line(reference: dict[str, Ended]) -> None:
    missing = "Cannot be imported here: No module named 'ringlab_course'"
    assert reference["--help"]["stdout"].count(missing) >= 7
    (said,) = reference["grade notebook.ipynb --unsafe"]["stderr"].splitlines()
    refusal = "ringlab: the command grade cannot be imported: No module named 'ringlab_course'"
    assert said == f"{refusal}; install ringlab again"


def test_no_package_of_an_extra_can_be_imported(installed: Environment) -> None:
    """No package of an extra can be imported; otherwise the tests of the environment would prove nothing."""
    assert set(OF_THE_LAB) | {"transformers", "jax", "distributed", "pytest"} <= installed.hidden
    code = "import importlib.util, sys\nprint(*(n for n in sys.argv[1:] if importlib.util.find_spec(n)))"
    assert installed.run("python", "-c", code, *sorted(installed.hidden)).stdout.split() == []


def test_every_module_of_the_reference_can_be_imported_without_the_course(
    installed: Environment,
) -> None:
    code = """
import importlib, sys
from pathlib import Path
sys.modules["ringlab_course"] = None
import ringlab
folder = Path(ringlab.__file__).parent
for path in sorted(folder.rglob("*.py")):
    parts = path.relative_to(folder.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    if not any(name == left_out or name.startswith(left_out + ".") for left_out in sys.argv[1:]):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: {error}")
"""
    left_out = {
        *NEED_MORE,
        *(() if "triton" in closure(PROJECT["dependencies"]) else ("ringlab.blocks.triton",)),
    }
    done = installed.run("python", "-c", code, *left_out)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_first_example_of_the_readme_runs(installed: Environment) -> None:
    example = (CHECKOUT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "ring_attention" in example
    done = installed.run("python", "-c", example)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wanting(installed: Environment) -> dict[str, Ended]:
    solution = str(CHECKOUT / "solutions/01_naive_attention.ipynb")
    copied = f"import shutil\nshutil.copy({solution!r}, '.')\n"
    return run(installed, [*NEED_AN_EXTRA, *COURSE], (), copied + FILES)


@pytest.mark.parametrize("line", COURSE)
def test_a_command_of_the_course_runs_without_extras(wanting: dict[str, Ended], line: str) -> None:
    assert wanting[line]["status"] == 0 and wanting[line]["stderr"] == ""


@pytest.mark.parametrize("line", NEED_AN_EXTRA)
def test_a_command_that_needs_an_extra_names_it_in_one_line(wanting: dict[str, Ended], line: str) -> None:
    ended = wanting[line]
    assert ended["status"] == 1 and ended["stdout"] == ""
    (said,) = ended["stderr"].splitlines()
    assert said.startswith("ringlab: needed: ")
    assert said.endswith(f"remedy: pip install 'ringlab[{NEED_AN_EXTRA[line]}]'")


def test_a_call_that_needs_an_extra_names_it_in_one_line(installed: Environment) -> None:
    code = """
import contextlib, io, sys
from ringlab.errors import MissingExtraError
for statement in sys.argv[1:]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(statement)
    except MissingExtraError as error:
        print(error)
    else:
        print("ran:", statement)
"""
    said = installed.run("python", "-c", code, *CALLS_NEED_AN_EXTRA).stdout.splitlines()
    assert len(said) == len(CALLS_NEED_AN_EXTRA)
    for line, extra in zip(said, CALLS_NEED_AN_EXTRA.values(), strict=True):
        assert line.startswith("needed: ") and line.endswith(f"remedy: pip install 'ringlab[{extra}]'")


def test_the_installed_program_runs_and_names_the_extra(installed: Environment) -> None:
    """Each command runs in its own process, as it does for a user."""
    done = installed.run("ringlab", "plan", "--list", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["models"] and done.stderr == ""
    done = installed.run("ringlab", "exercise", "fresh", "05")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1 and "'ringlab[lab]'" in done.stderr
