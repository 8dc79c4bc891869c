"""What may be skipped on a learner's machine may not be skipped where everything is required."""

from __future__ import annotations

import os
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


def run(folder: Path, required: bool, tests: str = TESTS) -> str:
    """Run TESTS where no bubblewrap, no browser and no GPU can be found; return pytest's output."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_needs.py").write_text(tests)
    marks = "".join(f"    {mark}: x\n" for mark in ("needs_bwrap", "needs_chromium", "needs_cuda"))
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{marks}")
    environment = {**os.environ, "PATH": str(folder), "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": ""}
    environment["RINGLAB_REQUIRE_ALL"] = "1" if required else "0"
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_needs.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


def test_a_machine_without_them_skips_and_says_how_to_mend_it(tmp_path: Path) -> None:
    output = run(tmp_path, required=False)
    assert "1 passed, 5 skipped" in output
    assert "needs bubblewrap: sudo apt-get update && sudo apt-get install -y bubblewrap" in output
    assert "needs chromium: sudo apt-get update && sudo apt-get install -y chromium" in output


def test_where_all_is_required_a_skip_is_a_failure(tmp_path: Path) -> None:
    output = run(tmp_path, required=True)
    assert "skipped although RINGLAB_REQUIRE_ALL=1" in output
    # The marked tests run; one that skips itself fails; a GPU is the one thing that may be absent.
    assert "1 failed, 3 passed, 2 skipped" in output


@pytest.mark.parametrize("required", [True, False])
def test_what_may_be_absent_is_said_in_one_loud_line(tmp_path: Path, required: bool) -> None:
    loud = [line for line in run(tmp_path, required).splitlines() if line.startswith("!!!")]
    assert len(loud) == 1 and "2 TESTS NOT RUN: needs an NVIDIA GPU" in loud[0] and "make gpu" in loud[0]


def test_no_skip_of_ones_own_passes_for_an_absent_gpu(tmp_path: Path) -> None:
    """The reason must be the one that tests/needs.py found, not merely sound like it."""
    tests = "import pytest\ndef test_shirks(): pytest.skip('needs an NVIDIA GPU')\n"
    output = run(tmp_path, required=True, tests=tests)
    assert "1 failed" in output and "NOT RUN" not in output


@pytest.mark.parametrize(("user", "printed"), [("1000", True), ("0", False)])
def test_the_missing_packages_are_named_loudly(tmp_path: Path, user: str, printed: bool) -> None:
    """Without root the script says the command once and goes on; as root it asks apt, here a stand-in."""
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


def test_a_machine_where_all_is_required_stops_without_them(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    environment = {"PATH": str(tmp_path), "RINGLAB_REQUIRE_ALL": "1"}
    script = str(CHECKOUT / "tools/system_packages.sh")
    done = subprocess.run(["/bin/sh", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "needed: bubblewrap chromium" in done.stderr
