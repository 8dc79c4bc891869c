"""Settings of `make gpu`, which loads nothing above this folder; tests that need more GPUs are skipped."""

from __future__ import annotations

import pytest

from tests import needs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs.skip_what_is_missing(items, needs.MAY_BE_ABSENT)
