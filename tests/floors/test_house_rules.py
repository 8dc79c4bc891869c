"""Every file of the project and every test run keeps the project's own rules."""

from __future__ import annotations

import importlib
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import chance

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]
WRITTEN_BY_HAND = (
    ".py",
    ".sh",
    ".toml",
    ".yml",
    ".yaml",
    ".md",
    ".json",
    ".cfg",
    ".ipynb",
    ".lock",
    "Makefile",
)
# A directory on one person's or one company's machine. /usr, /tmp and /dev are on every machine.
MACHINE_PATH = re.compile(r"""(?<![\w.$}~/-])/(?:home|Users|root|work|workspace|mnt|data|opt|srv)/[\w.-]+""")


def tracked() -> list[Path]:
    """Return the files in git or, in an unpacked archive without git, the files below the known folders."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=CHECKOUT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        paths = [CHECKOUT / name for name in listed.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        folders = ("ringlab", "tests", "ringlab_course", "tools", "notebooks", "exercises", "solutions")
        paths = [path for folder in folders for path in (CHECKOUT / folder).rglob("*")]
    return [path for path in paths if path.is_file() and path.name.endswith(WRITTEN_BY_HAND)]


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(CHECKOUT)) for path in paths]


def test_files_were_found() -> None:
    assert {"Makefile", "pyproject.toml", "ringlab/errors.py"} <= set(names(tracked()))


def test_no_path_of_one_machine() -> None:
    found = [f"{name}: {path}" for name in names(tracked()) for path in machine_paths(CHECKOUT / name)]
    assert found == []


def machine_paths(path: Path) -> list[str]:
    return MACHINE_PATH.findall(path.read_text()) if path != Path(__file__) else []


def test_a_path_of_one_machine_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(
        "WHEELS = '/srv/packages/torch.whl'\nSCRATCH = '/tmp/x'\nURL = 'https://example.org/home/page'\n"
    )
    assert machine_paths(file) == ["/srv/packages"]
    file.write_text('File "/home/someone/ringlab/x.py", line 3')
    assert machine_paths(file) == ["/home/someone"]


def test_no_room_called_utils() -> None:
    parts = {part.removesuffix(".py") for name in names(tracked()) for part in Path(name).parts}
    assert parts & {"utils", "util", "helpers", "misc", "common"} == set()


def _draws() -> list[float]:
    torch_and_legacy = torch.rand(()).item(), np.random.random(), random.random()
    return [*torch_and_legacy, np.random.default_rng().random(), secrets.randbits(64)]


def test_draws_follow_from_the_seed_and_the_name_of_the_test(request: pytest.FixtureRequest) -> None:
    seed, name = request.config.option.seed, request.node.nodeid
    found = _draws()
    chance.begin(seed, name)
    assert found == _draws()
    chance.begin(seed, f"{name} another")
    assert not set(found) & {*_draws()}


def test_examples_do_not_depend_on_the_modules_that_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hypothesis draws the same examples whichever of our modules are imported."""
    constants = {*range(10**6, 10**6 + 500)}
    (tmp_path / "imported_late.py").write_text(f"CONSTANTS = {sorted(constants)}\n")
    monkeypatch.syspath_prepend(tmp_path)
    drawn: list[int] = []

    @settings(max_examples=300, derandomize=True)
    @given(st.integers())
    def draw(number: int) -> None:
        drawn.append(number)

    draw()
    before = drawn.copy()
    drawn.clear()
    importlib.import_module("imported_late")
    draw()
    assert drawn == before and not constants & {*drawn}


_UNSEEDED = re.compile(
    r"\bos\.urandom\(|\buuid\.|\bSystemRandom\b|\bRandom\(\)|\bsecrets\.(?!randbits)|\b(?:manual_)?seed\(\)"
)
"""Draws that tests/chance.py does not reach."""


def unseeded(source: str) -> list[str]:
    return _UNSEEDED.findall(source)


def test_no_test_draws_what_no_seed_decides() -> None:
    tests = [path for path in tracked() if path.suffix == ".py" and path.is_relative_to(CHECKOUT / "tests")]
    written_here = {Path(__file__), CHECKOUT / "tests/chance.py"}
    assert [path for path in tests if path not in written_here and unseeded(path.read_text())] == []


@pytest.mark.parametrize(
    "source", ["os.urandom(8)", "uuid.uuid4()", "random.Random()", "secrets.token_hex()", "np.random.seed()"]
)
def test_a_draw_that_no_seed_decides_is_noticed(source: str) -> None:
    assert unseeded(f"x = {source}")


def _pytest_lines(target: str, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | variables
    told = subprocess.run(
        ["make", "-n", target], cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True
    )
    return [line for line in told.stdout.splitlines() if " -m pytest " in line]


def test_fresh_seeds_are_for_make_test_all_outside_of_ci() -> None:
    assert all("--seed fresh" in line for line in _pytest_lines("check-all"))
    for lines in (_pytest_lines("check"), _pytest_lines("check-all", CI="true")):
        assert lines and not any("--seed" in line for line in lines)


LEAVES = "import tempfile\ndef test_it():\n    assert tempfile.mkdtemp(prefix='ringlab-left-')\n"


@pytest.mark.parametrize(
    "source", [LEAVES, LEAVES.replace("mkdtemp", "TemporaryDirectory")], ids=["left", "tidy"]
)
def test_a_run_fails_in_which_something_is_left_in_the_temporary_directory(
    source: str, tmp_path: Path
) -> None:
    (tmp_path / "test_one.py").write_text(source)
    folder = tmp_path / "temporary"
    folder.mkdir()
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-c", os.devnull, tmp_path / "test_one.py"],
        cwd=CHECKOUT, env=surroundings | {"TMPDIR": str(folder)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "1 passed" in done.stdout
    assert done.returncode == (source == LEAVES) == ("ringlab-left-" in done.stderr), done.stderr
    assert [*folder.iterdir()] == []


SLEEPS = "import pathlib, time\ndef test_it():\n    pathlib.Path({ready!r}).touch()\n    time.sleep(60)\n"


@pytest.mark.parametrize("end", ["--help", "--nosuchoption", signal.SIGTERM, signal.SIGKILL], ids=str)
def test_pytest_leaves_no_folder_however_it_ends(end: str | signal.Signals, tmp_path: Path) -> None:
    """A run that never begins a session, or is killed within a test, leaves nothing in the temporary directory."""
    folder, ready = tmp_path / "temporary", tmp_path / "ready"
    folder.mkdir()
    (tmp_path / "test_one.py").write_text(SLEEPS.format(ready=str(ready)))
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-c",
        os.devnull,
        str(tmp_path / "test_one.py"),
    ]
    command += [] if isinstance(end, signal.Signals) else [end]
    with subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env=surroundings | {"TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        if isinstance(end, signal.Signals):
            eventually(ready.exists)
            assert [*folder.iterdir()]
            run.send_signal(end)
        run.wait()
    eventually(lambda: not [*folder.iterdir()])


def eventually(true: Callable[[], bool]) -> None:
    """Return once `true` is true. Raises: AssertionError after 30 seconds."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_make_test_runs_a_part_of_a_sweep_and_make_test_all_runs_all_of_it() -> None:
    def collected(*options: str) -> set[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            *options,
            "tests/cost/test_simulate.py",
        ]
        run = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        return {
            line
            for line in run.stdout.splitlines()
            if "::test_its_messages_are_those_of_a_run_with_data[" in line
        }

    whole, part, rest = collected(), collected("-m", "not thorough"), collected("-m", "thorough")
    assert part and rest and part | rest == whole and not part & rest
    assert len(part) < len(whole) / 2


def test_a_worker_runs_the_tests_of_a_file_together(pytestconfig: pytest.Config) -> None:
    """All tests of a file run on one worker, except that the sweep over answers is split by exercise."""
    plugin: Any = pytestconfig.pluginmanager.getplugin(str(CHECKOUT / "conftest.py"))
    group_of = plugin.group_of
    assert group_of("tests/test_plan.py::a[1]") == group_of("tests/test_plan.py::b") == "tests/test_plan.py"
    sweep = "tests/course/test_submissions.py::test_a_right_submission_passes_the_visible_tier"
    assert group_of(f"{sweep}[05/right_shift]") == group_of(f"{sweep}[05/right_loops]")
    assert group_of(f"{sweep}[05/right_shift]") != group_of(f"{sweep}[06/right_events]")
