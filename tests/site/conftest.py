"""The pages, built once, and a browser that looks at them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser.window import Window, window

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built pages, as `make site` builds them: without a warning, every link looked at."""
    folder = tmp_path_factory.mktemp("pages") / "site"
    command = [sys.executable, "-m", "tools.website", str(folder)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"pages: open {folder / 'index.html'}" in done.stdout
    return folder


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing: pytest's output is for its results."""


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """The address of the pages on a server of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Window]:
    """One browser window, shared by all tests of a module."""
    with window() as opened:
        yield opened
