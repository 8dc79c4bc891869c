"""A JupyterLab server and a browser for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.lab import Lab, serve
from tests.browser.notebook_page import enter
from tools.browser import Window, window


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Serve a copy of the course in JupyterLab."""
    with serve(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def browser(lab: Lab) -> Iterator[Window]:
    """Open a window with the JupyterLab of the `lab` fixture."""
    with window() as opened:
        enter(opened.page, lab)
        yield opened
