"""`make gpu` without a GPU: its commands, their order, and the packages that it needs, which it names."""

from __future__ import annotations

import os
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
    "cloudpickle",
    "platformdirs",
)

STAND_IN = """#!/bin/sh
printf '%s\\n' "$*" >>"{log}"
case "$*" in
    *is_available*) exit {no_gpu} ;;
    *get_device_name*) echo made-up-gpu ;;
    *pytest*) exit {tests} ;;
    -) cat >/dev/null; printf '%s' "{missing}" ;;
    *no_cuda*) echo "ringlab: needs an NVIDIA GPU" ;;
esac
"""


def run(
    folder: Path, no_gpu: int = 0, tests: int = 0, missing: str = "", **options: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script with a Python that records its calls; return the finished script and those calls."""
    log, python = folder / "calls", folder / "python"
    log.touch()
    python.write_text(STAND_IN.format(log=log, no_gpu=no_gpu, tests=tests, missing=missing))
    python.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ARGS", "PYTHONPATH")}
    environment = {**plain, "PYTHON": str(python), **options}
    done = subprocess.run(["/bin/sh", str(SCRIPT)], env=environment, capture_output=True, text=True)
    asked = [line for line in log.read_text().splitlines() if "pytest" in line or "main()" in line]
    return done, asked


def test_the_parts_run_in_order_and_results_are_named_after_the_gpu(tmp_path: Path) -> None:
    done, asked = run(tmp_path, RESULTS="there", FIGURES="pictures", RING_ARGS="--rounds 3")
    assert done.returncode == 0, done.stderr
    assert "-m pytest" in asked[0] and "tests/gpu" in asked[0] and "--confcutdir=tests/gpu" in asked[0]
    assert asked[1].endswith("bench kernels --output there/kernels-made-up-gpu.json")
    assert asked[2].endswith("bench ring --emulated 8 --output there/ring-made-up-gpu.json --rounds 3")
    assert "bench draw there/" in asked[3] and asked[3].endswith("--out pictures")
    assert len(asked) == 4


def test_a_failed_part_stops_no_other_but_is_told_at_the_end(tmp_path: Path) -> None:
    done, asked = run(tmp_path, tests=1)
    assert done.returncode == 1 and len(asked) == 4
    assert done.stderr.splitlines()[-1] == "ringlab: FAILED: tests"


def test_some_parts_only(tmp_path: Path) -> None:
    done, asked = run(tmp_path, PARTS="ring draw")
    assert done.returncode == 0 and ["bench ring" in asked[0], "bench draw" in asked[1]] == [True, True]
    assert run(tmp_path, PARTS="nonesuch")[0].returncode == 1


def test_without_a_gpu_or_a_package_it_says_so_and_runs_nothing(tmp_path: Path) -> None:
    done, asked = run(tmp_path, no_gpu=1)
    assert done.returncode == 1 and not asked and "needs an NVIDIA GPU" in done.stderr
    done, asked = run(tmp_path, missing="jaxtyping rich")
    assert done.returncode == 1 and not asked
    assert "needed: jaxtyping rich" in done.stderr and "-m pip install jaxtyping rich" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["tests/gpu", "commands"])
def test_nothing_else_is_imported(what: str) -> None:
    """The script imports only the packages that it names, even if other packages are missing."""
    code = f"import sys\nfor name in {OTHERS!r}: sys.modules[name] = None\n"
    if what == "commands":
        rooms = ("kernels", "emulated_ring", "draw", "tune")
        code += "\n".join(f"import ringlab.bench.{room}" for room in rooms)
        code += "\nfrom ringlab.cli import app\nimport ringlab.viz.style, matplotlib.figure"
    else:
        code += "import pytest\nsys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', "
        code += "'-p', 'no:hypothesispytest', '--confcutdir=tests/gpu', 'tests/gpu']))"
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
