"""The list of tests that only `make test-all` runs names tests that exist, and guards that `make test` runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.thorough import THOROUGH, guard_of

CHECKOUT = Path(__file__).resolve().parents[2]
_FILE = re.compile(r"(?:tests|notebooks)/[\w/]+\.(?:py|ipynb)")


@pytest.mark.parametrize("start", THOROUGH)
def test_a_thorough_test_exists(start: str) -> None:
    name, _, function = start.partition("::")
    assert (CHECKOUT / name).exists()
    assert not function or f"def {function.partition('[')[0]}" in (CHECKOUT / name).read_text()


@pytest.mark.parametrize("start", THOROUGH)
def test_its_guard_exists_and_is_not_thorough(start: str) -> None:
    for name in _FILE.findall(THOROUGH[start]):
        assert (CHECKOUT / name).exists()
        assert guard_of(name) is None


def test_a_test_is_thorough_by_the_beginning_of_its_name() -> None:
    assert guard_of("tests/site/test_site.py::test_x")
    assert guard_of("tests/laws/test_merge_laws.py::test_x") is None
