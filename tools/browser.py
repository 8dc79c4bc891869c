"""Chromium, headless, with one page; every address that it requests is recorded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Page

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
PATIENCE = 120_000
"""Milliseconds to wait for a page or a widget; only a failure takes so long."""


@dataclass
class Window:
    """A browser window: its page, the addresses that it requested, and the errors that the page reported."""

    page: Page
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def strangers(self) -> list[str]:
        """Return the requested addresses that are not on this machine's loopback."""
        return [url for url in self.asked if not _stays_here(url)]


def chromium_path() -> str | None:
    """Return the path of the machine's Chromium, or None if it has none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def window(width: int = 1280, height: int = 900) -> Iterator[Window]:
    """Open a browser with a user profile of its own, and close the browser at the end."""
    # imported late, because tests also ask for the browser's path where playwright is not installed
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path(), headless=True, args=list(QUIET), timeout=PATIENCE
        )
        context = browser.new_context(viewport={"width": width, "height": height})
        context.set_default_timeout(PATIENCE)
        seen = Window(context.new_page())
        context.on("request", lambda request: seen.asked.append(request.url))
        seen.page.on("websocket", lambda socket: seen.asked.append(socket.url))
        seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        yield seen
        browser.close()


def _stays_here(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in {"data", "blob", "about"} or parts.hostname == "127.0.0.1"
