"""Tests that may be skipped on a learner's machine must run if everything is required.

The set-up script prints what it needs if Python is too old or lacks venv, and is quick when run again.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

CONFTEST = "from tests.conftest import *\n"
TESTS = """
import pytest

@pytest.mark.needs_bwrap
def test_sandbox(): pass

@pytest.mark.needs_chromium
def test_browser(): pass

@pytest.mark.needs_cuda
@pytest.mark.parametrize("block", ["one", "another"])
def test_gpu(block): pass

def test_that_skips_itself(): pytest.skip("no reason")

def test_plain(): pass
"""


def run(folder: Path, required: bool) -> str:
    """Run TESTS without bubblewrap, browser and GPU; return pytest's output."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_needs.py").write_text(TESTS)
    marks = "".join(f"    {mark}: x\n" for mark in ("needs_bwrap", "needs_chromium", "needs_cuda"))
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{marks}")
    environment = {**os.environ, "PATH": str(folder), "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": ""}
    environment["RINGLAB_REQUIRE_ALL"] = "1" if required else "0"
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_needs.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


@pytest.mark.thorough
@pytest.mark.parametrize("required", [True, False])
def test_a_skip_says_how_to_mend_it_and_is_a_failure_where_all_is_required(
    tmp_path: Path, required: bool
) -> None:
    """Where all is required, the marked tests run and a test that skips itself fails. Only a GPU may be absent."""
    output = run(tmp_path, required)
    (line,) = (line for line in output.splitlines() if line.startswith("!!!"))
    assert "2 TESTS NOT RUN: needs an NVIDIA GPU" in line and "make gpu" in line
    if required:
        assert (
            "skipped although RINGLAB_REQUIRE_ALL=1" in output and "1 failed, 3 passed, 2 skipped" in output
        )
        return
    assert "1 passed, 5 skipped" in output
    for package in ("bubblewrap", "chromium"):
        assert f"needs {package}: sudo apt-get update && sudo apt-get install -y {package}" in output


@pytest.mark.parametrize(("user", "printed"), [("1000", True), ("0", False)])
def test_the_missing_packages_are_named_loudly(tmp_path: Path, user: str, printed: bool) -> None:
    """Without root the script prints the install command and continues; as root it calls apt (a stand-in)."""
    apt = tmp_path / "apt-get"
    for name, body in (
        ("id", f"echo {user}"),
        ("uname", "echo Linux"),
        ("apt-get", f'echo "$@" >>"{apt}.log"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    script = str(CHECKOUT / "tools/system_packages.sh")
    done = subprocess.run(["/bin/sh", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("sudo apt-get update && sudo apt-get install -y bubblewrap chromium") == printed
    log = Path(f"{apt}.log")
    asked = log.read_text().splitlines() if log.exists() else []
    assert [line.split()[0] for line in asked] == ([] if printed else ["update", "install"])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with only the set-up, in a directory with spaces in its name."""
    folder = tmp_path / "a checkout with spaces"
    shutil.copytree(CHECKOUT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(CHECKOUT / name, folder)
    return folder


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    command = ["/bin/sh", str(checkout / "tools/setup.sh")]
    return subprocess.run(command, env={**plain, **environment}, capture_output=True, text=True)


OLD = 'case "$1" in --version) echo Python 3.8.18 ;; *) exit 1 ;; esac'


def test_a_chosen_python_that_is_too_old_is_refused(checkout: Path, tmp_path: Path) -> None:
    done = setup(checkout, PYTHON=str(script(tmp_path / "old python", OLD)))
    assert done.returncode == 1
    assert "needed: Python 3.11, 3.12 or 3.13" in done.stderr
    assert "old python, Python 3.8.18" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_newer_python_is_found_where_python3_is_too_old(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    script(tools / "python3", OLD)
    script(
        tools / "python3.12", f'case "$*" in *ensurepip*) exit 1 ;; *) exec "{sys.executable}" "$@" ;; esac'
    )
    tools.joinpath("dirname").symlink_to(str(shutil.which("dirname")))
    done = setup(checkout, PATH=str(tools))
    # The script chose the newer Python, and then stopped because of this:
    assert "Python 3.8" not in done.stderr
    assert "needed: Python's venv and ensurepip modules" in done.stderr
    assert "apt-get install python3-venv" in done.stderr
    assert done.returncode == 1


def test_the_second_run_installs_nothing_and_a_changed_lock_installs_again(checkout: Path) -> None:
    """A second run installs nothing, but a run with a changed lock does; pip is a stand-in with a log."""
    log = checkout / "pip.log"
    body = f'case "$2" in pip) echo "$@" >>"{log}" ;; *) exec "{sys.executable}" "$@" ;; esac'
    script(checkout / ".venv/bin/python", body)
    assert setup(checkout).returncode == 0
    first = log.read_text()
    assert first.count("-c requirements.lock") == 2 and first.rstrip().endswith("-e .[lab]")
    assert (checkout / ".venv/share/jupyter/lab/settings/overrides.json").exists()
    assert setup(checkout).returncode == 0
    assert log.read_text() == first
    with (checkout / "requirements.lock").open("a") as lock:
        lock.write("zzz==1\n")
    assert setup(checkout).returncode == 0
    assert log.read_text() == first * 2


def test_the_lab_serves_this_machine_only_and_asks_nobody_for_news() -> None:
    lab = runpy.run_path(str(CHECKOUT / "tools/lab.py"))
    command = lab["command"](["--no-browser"])
    assert "--ServerApp.ip=127.0.0.1" in command
    assert f"--ServerApp.root_dir={CHECKOUT}" in command
    assert "--LabApp.news_url=None" in command
    assert not any("token" in argument for argument in command)
    assert command[-1] == "--no-browser"
    assert (CHECKOUT / lab["FIRST"]).exists()
