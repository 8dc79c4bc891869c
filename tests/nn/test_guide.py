"""Training as the guide has it: alone, on virtual ranks and on processes the losses are the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ringlab import launch

GUIDE = (Path(__file__).parents[2] / "docs/guide/training.md").read_text(encoding="utf-8")
[EXAMPLE] = re.findall(r"```python\n(from ringlab import VirtualCluster\n.*?)```", GUIDE, re.DOTALL)


def test_the_example_of_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "steps=5" in EXAMPLE and '`launch(train, 4, recipe, "runs/first")`' in GUIDE
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(EXAMPLE.replace("steps=5", "steps=4"), names)
    alone, virtual, train, recipe = (names[name] for name in ("alone", "virtual", "train", "recipe"))
    processes = launch(train, 4, recipe, "runs/first").results[0]
    assert virtual == processes, "virtual ranks and processes differ"
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(virtual, alone, strict=True))
    assert (tmp_path / "runs/first/latest").read_text() == "step-00000004"
