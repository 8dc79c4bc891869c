"""Run the tests of the Triton kernels in the interpreter of every supported Triton, with the newest NumPy.

    python tools/triton_versions.py                  Triton 3.6 to 3.9
    python tools/triton_versions.py 3.6.0 3.8.0      only these versions
    python tools/triton_versions.py --tests tests/blocks/test_interpreter.py

Each version is downloaded once, without its dependencies, into its own folder below --folder, which by
default is a temporary folder. PYTHONPATH puts this Triton before the environment's own packages, so the
environment is not changed, and the installed torch is used. The script needs the network and about 700 MB per
version, so `make test` does not run it. The exit status is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
TESTS = (
    "tests/blocks/test_interpreter.py", "tests/blocks/test_triton*.py", "tests/blocks/test_kernel*.py", "tests/course/test_accesses.py",
)  # fmt: skip


def fetched(version: str, folder: Path) -> Path:
    """Return the folder with this version of Triton and the newest NumPy.

    Download them if they are missing.
    """
    target = folder / f"triton-{version}"
    if not (target / "triton").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*command, f"triton=={version}", "numpy"], check=True)
    return target


def run(version: str, packages: Path, tests: list[str]) -> bool:
    """Run the tests with these packages, and return whether all tests passed."""
    paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    ask = "import numpy, torch, triton; print(triton.__version__, numpy.__version__, torch.__version__)"
    answer = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True
    )
    found, numpy, torch = answer.stdout.split()
    if found != version:
        raise SystemExit(
            f"needed: Triton {version}\n   got: {found}\nremedy: remove {packages} and try again"
        )
    print(f"== Triton {found}, NumPy {numpy}, torch {torch}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=10", *tests]
    return subprocess.run(command, cwd=CHECKOUT, env=environment).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "ringlab-tritons")
    parser.add_argument("--tests", nargs="+", help="instead of all that run kernels in the interpreter")
    given = parser.parse_args()
    tests = given.tests or sorted(str(path) for pattern in TESTS for path in CHECKOUT.glob(pattern))
    passed = {version: run(version, fetched(version, given.folder), tests) for version in given.versions}
    for version, good in passed.items():
        print(f"Triton {version}: {'passed' if good else 'FAILED'}")
    sys.exit(0 if all(passed.values()) else 1)


if __name__ == "__main__":
    main()
