"""Look at a notebook as a learner would: `python -m tests.browser.look NOTEBOOK OUT.png`.

The command runs the notebook from top to bottom in JupyterLab, writes screenshots of its parts as OUT-1.png,
OUT-2.png, …, and prints visible problems: errors, warnings, pictures without alternative text, output that is
cut off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page

from tests.browser.lab import CHECKOUT, serve
from tests.browser.notebook_page import NotebookPage, enter, open_notebook
from tests.browser.window import window

HEIGHT = 2000
# Every cell gets a DOM element, so that scrolling by pixels reaches all cells.
DRAW_ALL = """async () => {
    const panel = window.jupyterapp.shell.currentWidget;
    panel.content.notebookConfig = {...panel.content.notebookConfig, windowingMode: 'none'};
    window.jupyterapp.shell.collapseLeft();
    await new Promise(done => setTimeout(done, 1500));
}"""
SCROLLER = """() => {
    const node = window.jupyterapp.shell.currentWidget.content.node;
    return [node, ...node.querySelectorAll('*')].find(e => e.scrollHeight > e.clientHeight + 4
        && ['auto', 'scroll'].includes(getComputedStyle(e).overflowY) && e.querySelector('.jp-Cell'));
}"""
SCROLL = f"top => {{ const e = ({SCROLLER})(); if (!e) return [0, 1, 1]; e.scrollTop = top; \
return [e.scrollTop, e.clientHeight, e.scrollHeight]; }}"
WITHOUT_WORDS = """() => [...window.jupyterapp.shell.currentWidget.node.querySelectorAll('img')].filter(e => !e.alt).length"""
WIDER_THAN_ROOM = """() => [...window.jupyterapp.shell.currentWidget.node.querySelectorAll(
    '.jp-OutputArea-child, .widget-html, .jp-RenderedMarkdown, .jp-RenderedMarkdown table, .jp-RenderedText')]
    .filter(e => e.scrollWidth > e.clientWidth + 2)
    .map(e => `${e.className}: ${e.scrollWidth} px in ${e.clientWidth}: ${e.innerText.slice(0, 70)}`)"""


def findings(notebook: NotebookPage) -> list[str]:
    """Return the problems that a person should look at, each with the number of its cell."""
    page = notebook.page
    found = [f"cell {cell.index}: {error}" for cell in notebook.cells for error in cell.errors]
    found += [f"cell {cell.index} on stderr: {cell.warnings}" for cell in notebook.cells if cell.warnings]
    found += [
        f"cell {cell.index}: {lines} lines of output"
        for cell in notebook.cells
        if (lines := cell.text.count("\n")) > 40
    ]
    if count := page.evaluate(WITHOUT_WORDS):
        found.append(f"{count} pictures without alternative text")
    return found + page.evaluate(WIDER_THAN_ROOM)


def photograph(page: Page, out: Path) -> list[Path]:
    """Write screenshots of all parts of the notebook, from top to bottom, and return their paths."""
    page.evaluate(DRAW_ALL)
    paths: list[Path] = []
    top, step, whole = page.evaluate(SCROLL, 0)
    while True:
        page.wait_for_timeout(400)
        paths.append(out.with_name(f"{out.stem}-{len(paths) + 1}.png"))
        page.screenshot(path=paths[-1])
        if top + step >= whole - 1:
            return paths
        top, step, whole = page.evaluate(SCROLL, top + step - 40)


def main() -> int:
    """Run, photograph and report one notebook; return 1 if a cell failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--as-built", action="store_true", help="do not run it")
    parser.add_argument("--height", type=int, default=HEIGHT, help="pixels of one screenshot")
    chosen = parser.parse_args()
    path = chosen.notebook.resolve().relative_to(CHECKOUT).as_posix()
    with (
        tempfile.TemporaryDirectory(prefix="ringlab-look-") as scratch,
        serve(Path(scratch)) as lab,
        window(width=1180, height=chosen.height) as browser,
    ):
        enter(browser.page, lab)
        notebook = open_notebook(browser.page, path)
        if not chosen.as_built:
            notebook.run_all()
        print(*photograph(browser.page, chosen.out), sep="\n")
        print(*findings(notebook), *browser.complaints, sep="\n")
        print(*(f"asked elsewhere: {url}" for url in browser.strangers()), sep="\n")
        return int(any(cell.errors for cell in notebook.cells))


if __name__ == "__main__":
    sys.exit(main())
