"""The pages, built once, and a browser that shows them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.browser import Window, window

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the pages as `make site` does, without warnings and with all links checked; return the folder."""
    folder = tmp_path_factory.mktemp("pages") / "site"
    command = [sys.executable, "-m", "tools.website", str(folder)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"pages: open {folder / 'index.html'}" in done.stdout
    return folder


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Print nothing, since pytest's output is for test results."""


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """Serve the pages on this machine, and yield their address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Window]:
    """Open one browser window for all tests of a module."""
    with window() as opened:
        yield opened
