"""The example of training in the README runs, and its three curves are one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
[EXAMPLE] = re.findall(r"```py\n(from ringlab import VirtualCluster, launch\n.*?)```", README, re.DOTALL)


def test_the_example_of_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "steps=40" in EXAMPLE
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(EXAMPLE.replace("steps=40", "steps=4"), names)
    alone, virtual, processes = (names[name] for name in ("alone", "virtual", "processes"))
    assert virtual == processes, "virtual ranks and processes differ"
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(virtual, alone, strict=True))
    assert (tmp_path / "runs/first/latest").read_text() == "step-00000004"
