"""Moving a cell's widgets as someone without a mouse does: focus and keys."""

from __future__ import annotations

from playwright.sync_api import Locator


def press_button(cell: Locator, name: str, told: str) -> None:
    """Press the button `name` by the space bar and wait until the cell says `told`."""
    button = cell.get_by_role("button", name=name, exact=True)
    button.focus()
    button.press(" ")
    cell.get_by_text(told).wait_for()


def type_number(cell: Locator, number: str, told: str) -> None:
    """Type a number into the cell's field, go on to its button, press it, and wait for `told`."""
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
