"""A picture of the lesson, shown below the lesson's title."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterator

from nbformat import NotebookNode
from PIL import Image

from ringlab.viz.frontend import FRAMES

from .links import slug

_WHOLE = (0.0, 0.0, 1.0, 1.0)
# None of these parts answers a question of its lesson. Lessons 18 and 20 begin with a picture of their own.
_CHOSEN = {
    "00": ("Lesson 09, The backward ring", (0, 0, 1, 0.55)),
    "01": ("One head of attention", _WHOLE),
    "02": ("Bars side by side", _WHOLE),
    "03": ("Forward, step 12", (0, 0, 1, 0.6)),
    "04": ("Program 0 reads X", _WHOLE),
    "05": ("bytes). Step 1.", (0, 0.07, 0.61, 0.54)),
    "06": ("512 tokens on each of 4 ranks", (0, 0, 1, 0.45)),
    "07": ("Visible pairs of each rank's queries", (0.08, 0, 0.92, 0.9)),
    "08": ("tiles of 4 × 4 scores", (0, 0, 1, 0.3)),
    "09": ("Step 1: what stands in", (0, 0, 0.43, 0.72)),
    "10": ("250, then 1 added", _WHOLE),
    "11": ("Real clocks", _WHOLE),
    "12": ("State and results", (0, 0, 1, 0.725)),
    "13": ("Waiting first", (0, 0, 1, 0.85)),
    "14": ("Which of 4 ranks", _WHOLE),
    "15": ("What rank 1 of 4", _WHOLE),
    "16": ("yew: found by", (0, 0, 1, 0.385)),
    "17": ("Two programs side by side", (0, 0, 1, 0.69)),
    "19": ("Queries by keys, in 4 chunks", _WHOLE),
}
"""Words of a picture's description, and the left, upper, right and lower edge of the part to show, by lesson."""
_FRAME = re.compile(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]*)"')


def add(notebook: NotebookNode, number: str) -> None:
    """Show the lesson's picture below its title, as a link to the section that has the picture.

    Raises: ValueError if no picture has the description.
    """
    if number not in _CHOSEN:
        return
    words, edges = _CHOSEN[number]
    found = [each for each in _pictures(notebook) if words in each[1]]
    if not found:
        raise ValueError(
            f"needed: a picture of lesson {number} described by {words!r}, as opening.py says\n   got: none"
        )
    place, alt, png = found[0]
    texts = [cell.source for cell in notebook.cells[:place] if cell.cell_type == "markdown"]
    heading = re.findall(r"^#+ (.+)$", "\n".join(texts), re.MULTILINE)[-1]
    anchor = slug(heading).lstrip("0123456789-")
    if edges != _WHOLE:  # the description may tell what the part leaves out
        alt = f"Part of a picture of the section “{heading}”."
    shown = f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{_part(png, edges)}">'
    name, _, rest = notebook.cells[0].source.partition("\n")
    notebook.cells[0].source = f'{name}\n\n<p class="opening"><a href="#{anchor}">{shown}</a></p>\n{rest}'


def _pictures(notebook: NotebookNode) -> Iterator[tuple[int, str, str]]:
    """Yield the place of the cell, the description and the PNG of every picture and of every frame."""
    for place, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            for alt, png in _FRAME.findall("".join(data.get(FRAMES, {}).get("pictures", []))):
                yield place, html.unescape(alt), png
            if "image/png" in data:
                alt = output.metadata.get("image/png", {}).get("alt", "")
                yield place, " ".join(alt.split()), data["image/png"]


def _part(png: str, edges: tuple[float, float, float, float]) -> str:
    """Return the part of a picture between edges, which are shares of its width and height."""
    picture, part = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    left, upper, right, lower = (
        round(edge * size) for edge, size in zip(edges, 2 * picture.size, strict=True)
    )
    picture.crop((left, upper, right, lower)).save(part, "PNG")
    return base64.b64encode(part.getvalue()).decode()
