"""Chromium, headless, with one page; every address that it requests is recorded.

The helpers use a cell's widgets by focus and keys, as someone without a mouse does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Locator, Page, sync_playwright

from tests.needs import chromium_path

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


@contextmanager
def window(width: int = 1280, height: int = 900) -> Iterator[Window]:
    """Open a browser with a user profile of its own, and close the browser at the end."""
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


def press_button(cell: Locator, name: str, told: str) -> None:
    """Press the button `name` by the space bar and wait until the cell shows `told`."""
    button = cell.get_by_role("button", name=name, exact=True)
    button.focus()
    button.press(" ")
    cell.get_by_text(told).wait_for()


def type_number(cell: Locator, number: str, told: str) -> None:
    """Type a number into the cell's field, tab to its button, press it, and wait for the text `told`."""
    field = cell.get_by_placeholder("a number")
    field.focus()
    field.press_sequentially(number)
    field.press("Tab")
    cell.page.keyboard.press(" ")
    cell.get_by_text(told).wait_for()


def arrow(cell: Locator, key: str) -> None:
    """Press an arrow key on the cell's slider."""
    handle = cell.locator(".widget-slider .noUi-handle")
    handle.focus()
    handle.press(key)
