"""tools/triton_versions.py downloads what it runs, runs what it says, and notices when it does not."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "triton_versions.py"


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("triton_versions", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tool: ModuleType) -> list[tuple[list[str], dict[str, Any]]]:
    """The commands that are run; Triton says it is 3.8.0, and pytest finds a failure."""
    told: list[tuple[list[str], dict[str, Any]]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        told.append((command, options))
        return subprocess.CompletedProcess(command, int("pytest" in command), "3.8.0 2.5.0 2.13.0\n", "")

    monkeypatch.setattr(tool.subprocess, "run", run)
    return told


def test_a_version_is_downloaded_once(tool: ModuleType, commands: list[Any], tmp_path: Path) -> None:
    assert tool.fetched("3.8.0", tmp_path) == tmp_path / "triton-3.8.0"
    (tmp_path / "triton-3.8.0" / "triton").mkdir(parents=True)
    tool.fetched("3.8.0", tmp_path)
    assert [command[-2:] for command, _ in commands] == [["triton==3.8.0", "numpy"]]
    assert "--no-deps" in commands[0][0]


def test_tests_run_with_these_packages_in_the_interpreter(
    tool: ModuleType, commands: list[Any], tmp_path: Path
) -> None:
    assert not tool.run("3.8.0", tmp_path, ["tests/blocks"])
    command, options = commands[-1]
    assert "pytest" in command and command[-1] == "tests/blocks"
    assert options["env"]["PYTHONPATH"].startswith(str(tmp_path))
    assert options["env"]["TRITON_INTERPRET"] == "1"


def test_another_version_than_asked_for_is_an_error(
    tool: ModuleType, commands: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"needed: Triton 3\.6\.0\n +got: 3\.8\.0"):
        tool.run("3.6.0", tmp_path, [])


def test_the_tests_it_runs_are_there(tool: ModuleType) -> None:
    names = {path.name for pattern in tool.TESTS for path in (TOOL.parents[1] / "tests/blocks").glob(pattern)}
    assert {"test_interpreter.py", "test_accesses.py"} <= names
