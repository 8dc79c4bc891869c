"""`make gpu` runs the right command, and names the packages that it needs; no GPU is needed here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "tools/gpu_check.sh"
# Packages that the lock also installs, and that a machine set up for other work may lack.
OTHERS = (
    "hypothesis",
    "beartype",
    "IPython",
    "ipywidgets",
    "jupytext",
    "nbformat",
    "platformdirs",
)

STAND_IN = """#!/bin/sh
printf '%s\\n' "$*" >>"{log}"
case "$*" in
    *is_available*) exit {no_gpu} ;;
    *"bench hour"*) exit {status} ;;
    -) cat >/dev/null; printf '%s' "{missing}" ;;
    *no_cuda*) echo "ringlab: needs an NVIDIA GPU" ;;
esac
"""


def run(
    folder: Path, no_gpu: int = 0, status: int = 0, missing: str = "", **options: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script with a Python that records its calls; return the finished script and those calls."""
    log, python = folder / "calls", folder / "python"
    log.touch()
    python.write_text(STAND_IN.format(log=log, no_gpu=no_gpu, status=status, missing=missing))
    python.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if name not in ("HOUR_ARGS", "PYTHONPATH")}
    environment = {**plain, "PYTHON": str(python), **options}
    done = subprocess.run(["/bin/sh", str(SCRIPT)], env=environment, capture_output=True, text=True)
    asked = [line for line in log.read_text().splitlines() if "-m ringlab" in line]
    return done, asked


@pytest.mark.parametrize("status", [0, 1])
def test_the_hour_runs_with_its_options_and_its_exit_status_counts(status: int, tmp_path: Path) -> None:
    done, asked = run(tmp_path, status=status, HOUR_ARGS="--steps kernels --again")
    assert done.returncode == status, done.stderr
    assert asked == ["-m ringlab bench hour --steps kernels --again"]


def test_without_a_gpu_or_a_package_it_says_so_and_runs_nothing(tmp_path: Path) -> None:
    done, asked = run(tmp_path, no_gpu=1)
    assert done.returncode == 1 and not asked and "needs an NVIDIA GPU" in done.stderr
    done, asked = run(tmp_path, missing="jaxtyping rich")
    assert done.returncode == 1 and not asked
    assert "needed: jaxtyping rich" in done.stderr and "-m pip install jaxtyping rich" in done.stderr


def test_no_test_is_skipped_for_a_package_that_the_script_does_not_name() -> None:
    """The script names each package without which a test would be skipped, such as cloudpickle."""
    wanted = {
        name
        for file in (CHECKOUT / "tests/gpu").glob("*.py")
        for name in re.findall(r'importorskip\("(\w+)"', file.read_text())
    }
    assert wanted and all(f'"{name}"' in SCRIPT.read_text() for name in wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["tests/gpu", "commands"])
def test_nothing_else_is_imported(what: str) -> None:
    """The script imports only the packages that it names, even if other packages are missing."""
    code = f"import sys\nfor name in {OTHERS!r}: sys.modules[name] = None\n"
    if what == "commands":
        rooms = ("kernels", "emulated_ring", "draw", "tune", "hour")
        code += "\n".join(f"import ringlab.bench.{room}" for room in rooms)
        code += "\nfrom ringlab.cli import app\nimport ringlab.viz.style, matplotlib.figure"
        code += "\nimport ringlab_course.cli.lab, ringlab_course.lab.l1, ringlab_course.lab.l2"
    else:
        code += "import pytest\nsys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', "
        code += "'-p', 'no:hypothesispytest', '--confcutdir=tests/gpu', 'tests/gpu']))"
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
