"""A notebook in JupyterLab as a page object: open it, run it, read its outputs, find its widgets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Locator, Page

from tests.browser.lab import Lab
from tools.browser import PATIENCE

RUNNING = 300_000
"""Milliseconds for a whole notebook on a loaded machine."""

OPEN = """path => window.jupyterapp.commands.execute('docmanager:open', {path}).then(() => null)"""
# JupyterLab shows the notebook, with one empty cell, before it has read the file.
IS_OPEN = """path => {
    const opened = window.jupyterapp?.shell?.currentWidget;
    return opened?.context?.path === path && opened.context.isReady
        && opened.content.widgets.length === opened.content.model.cells.length;
}"""
# JupyterLab shows "Idle" before the kernel is connected; cells that are run before that are dropped.
KERNEL_READY = """() => {
    const kernel = window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel;
    return kernel?.status === 'idle' && kernel?.connectionStatus === 'connected';
}"""
READ_CELLS = """() => window.jupyterapp.shell.currentWidget.content.widgets.map((cell, index) => ({
    index,
    kind: cell.model.type,
    source: cell.model.sharedModel.getSource(),
    grade: cell.model.sharedModel.getMetadata('grade') ?? null,
    outputs: cell.model.type === 'code' ? cell.model.outputs.toJSON() : [],
}))"""
FORGET = """([first, last]) => window.jupyterapp.shell.currentWidget.content.widgets
    .slice(first, last).forEach(cell => cell.model.type === 'code' && cell.model.clearExecution())"""
# This is true once all cells of the range have run, or one has failed, so that the cells after it will not
# run.
FINISHED = """([first, last]) => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets.slice(first, last)
        .filter(cell => cell.model.type === 'code' && cell.model.sharedModel.getSource().trim());
    const failed = cells.some(cell => cell.model.outputs.toJSON().some(o => o.output_type === 'error'));
    return failed || cells.every(cell => cell.model.executionCount !== null);
}"""
SELECT = """async index => {
    const content = window.jupyterapp.shell.currentWidget.content;
    content.deselectAll();
    content.activeCellIndex = index;
    content.mode = 'command';
    // Cells get their heights when they are first drawn, which moves what was scrolled to.
    for (let again = 0; again < 3; again++) {
        await content.scrollToItem(index, 'start');
        await new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)));
    }
    content.widgets[index].node.setAttribute('data-cell', String(index));
}"""
COMMAND = """name => { window.jupyterapp.commands.execute(name); }"""
SET_SOURCE = """([index, source]) =>
    window.jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel.setSource(source)"""
# The outputs of cells `first` to `last` that are at least partly visible in the window now.
VISIBLE = """([first, last]) => window.jupyterapp.shell.currentWidget.content.widgets.slice(first, last + 1)
    .flatMap(cell => [...cell.node.querySelectorAll('.jp-OutputArea-output')])
    .filter(node => node.checkVisibility({visibilityProperty: true, opacityProperty: true}))
    .filter(node => {
        const box = node.getBoundingClientRect();
        return box.height > 0 && box.bottom > 0 && box.top < window.innerHeight;
    })
    .map(node => node.textContent.trim() || 'a picture')"""
HEIGHT = """index =>
    window.jupyterapp.shell.currentWidget.content.widgets[index].node.getBoundingClientRect().height"""
IN_WINDOW = """index => {
    const cell = window.jupyterapp.shell.currentWidget.content.widgets[index];
    const box = cell.node.getBoundingClientRect();
    return cell.isAttached && box.height > 0 && box.bottom > 0 && box.top < window.innerHeight;
}"""
KEEP_BUSY = """seconds => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    kernel.requestExecute({code: `import time; time.sleep(${seconds})`, store_history: false});
}"""
SAVE = """() => window.jupyterapp.commands.execute('docmanager:save').then(() => null)"""
SAVED = """() => !window.jupyterapp.shell.currentWidget.context.model.dirty"""


@dataclass(frozen=True)
class Cell:
    """One cell, with the contents that it has in the browser's model."""

    index: int
    kind: str
    source: str
    grade: str | None
    outputs: tuple[dict[str, Any], ...]

    @property
    def text(self) -> str:
        """Return the printed text and the text of the results of the cell."""
        return "".join(map(_text, self.outputs))

    @property
    def errors(self) -> list[str]:
        """Return the last line of each traceback."""
        return [f"{o['ename']}: {o['evalue']}" for o in self.outputs if o["output_type"] == "error"]

    @property
    def warnings(self) -> str:
        """Return the text that the cell wrote on stderr."""
        return "".join(_text(o) for o in self.outputs if o.get("name") == "stderr")


class NotebookPage:
    """The notebook at `path`, shown in the foreground."""

    def __init__(self, page: Page, path: str) -> None:
        self.page, self.path = page, path

    @property
    def cells(self) -> list[Cell]:
        """Return all cells with their present contents."""
        return [Cell(**{**c, "outputs": tuple(c["outputs"])}) for c in self.page.evaluate(READ_CELLS)]

    def find(self, text: str) -> Cell:
        """Return the first code cell whose source contains `text`."""
        return next(cell for cell in self.cells if cell.kind == "code" and text in cell.source)

    def graded(self, stage: str) -> Cell:
        """Return the cell that the grader assigns to `stage`."""
        return next(cell for cell in self.cells if cell.grade == stage)

    def run_all(self) -> None:
        """Clear all outputs, choose Run, Run All Cells in the menu, and wait for the last cell."""
        self._forget(0, None)
        self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
        self.page.locator("li.lm-Menu-item[data-command='runmenu:run-all']").click()
        self._finish(0, None)

    def run_above(self, index: int) -> None:
        """Run all cells above this one, as the Run menu does."""
        self._run("notebook:run-all-above", index, 0, index)

    def run_below(self, index: int) -> None:
        """Run this cell and all below, as the Run menu does."""
        self._run("notebook:run-all-below", index, index, None)

    def run(self, index: int) -> Cell:
        """Run this cell and return it with its outputs."""
        self._run("notebook:run-cell", index, index, index + 1)
        return self.cells[index]

    def select(self, index: int) -> Locator:
        """Make this cell the active one, bring it into view, and return its element."""
        self.page.evaluate(SELECT, index)
        return self.page.locator(f".jp-Cell[data-cell='{index}']")

    def visible(self, first: int, last: int) -> list[str]:
        """Return the texts of the outputs of cells `first` to `last` that can be seen in the window now."""
        return self.page.evaluate(VISIBLE, [first, last])

    def height(self, index: int) -> float:
        """Return the height of a cell in pixels."""
        return self.page.evaluate(HEIGHT, index)

    def in_window(self, index: int) -> bool:
        """Return whether any part of a cell can be seen in the window now."""
        return self.page.evaluate(IN_WINDOW, index)

    def write(self, index: int, source: str) -> None:
        """Put `source` into a cell."""
        self.page.evaluate(SET_SOURCE, [index, source])

    def keep_busy(self, seconds: float) -> None:
        """Keep the kernel from receiving messages for `seconds`, so that typing and clicks queue up."""
        self.page.evaluate(KEEP_BUSY, seconds)

    def save(self) -> None:
        """Save the notebook."""
        self.page.evaluate(SAVE)
        self.page.wait_for_function(SAVED)

    def _run(self, command: str, index: int, first: int, last: int | None) -> None:
        self._forget(first, last)
        self.select(index)
        self.page.evaluate(COMMAND, command)
        self._finish(first, last)

    def _forget(self, first: int, last: int | None) -> None:
        self.page.wait_for_function(KERNEL_READY, timeout=RUNNING)
        self.page.evaluate(FORGET, [first, *_end(last)])

    def _finish(self, first: int, last: int | None) -> None:
        self.page.wait_for_function(FINISHED, arg=[first, *_end(last)], timeout=RUNNING)
        self.page.wait_for_function(KERNEL_READY, timeout=RUNNING)


def enter(page: Page, lab: Lab) -> None:
    """Open the URL that the server printed."""
    page.goto(lab.url)
    page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.sessionContext")


def open_notebook(page: Page, path: str, *, kernel: bool = True) -> NotebookPage:
    """Open the notebook at `path` below the served folder; with `kernel`, wait until it has a kernel."""
    page.evaluate(OPEN, path)
    page.wait_for_function(IS_OPEN, arg=path, timeout=PATIENCE)
    if kernel:
        page.wait_for_function(KERNEL_READY, timeout=PATIENCE)
    return NotebookPage(page, path)


def _end(last: int | None) -> list[int]:
    return [] if last is None else [last]


def _text(output: dict[str, Any]) -> str:
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return text if isinstance(text, str) else "".join(text)


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
