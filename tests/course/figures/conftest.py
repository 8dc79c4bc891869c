"""A fixture that records what a figure displays, without a notebook."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that collects the data of each output that a figure displays."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: found.append(data))
    return found
