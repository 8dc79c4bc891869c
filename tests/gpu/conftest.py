"""For `make gpu`, which loads nothing above this folder: skip what needs more GPUs than there are."""

from __future__ import annotations

import pytest

from tests import needs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs.skip_what_is_missing(items, needs.MAY_BE_ABSENT)
