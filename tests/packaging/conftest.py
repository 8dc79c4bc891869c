"""Builds the wheel once, without downloads, from a copy, so that the checkout stays unchanged."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
