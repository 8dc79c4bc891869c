"""Move pictures from the HTML of pages into files, so that a page can be read before its pictures load."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

FOLDER = "_images"
"""The folder in which Sphinx puts the other pictures."""
_HELD = re.compile(r'src="data:image/png;base64,\s*([^"]+)"')


def move(site: Path) -> None:
    """Move every PNG inside a page of the built site into a file, which loads when its place comes near.

    Raises: ValueError if no page contains a PNG, because then pictures are recorded differently.
    """
    found = 0
    for page in site.rglob("*.html"):
        folder = Path(*[".."] * len(page.relative_to(site).parts[:-1])) / FOLDER

        def moved(held: re.Match[str], folder: Path = folder) -> str:
            data = base64.b64decode(held[1])
            file = f"{hashlib.sha256(data).hexdigest()}.png"
            (site / FOLDER / file).write_bytes(data)
            width, height = size(data)
            return f'src="{(folder / file).as_posix()}" loading="lazy" width="{width}" height="{height}"'

        text, count = _HELD.subn(moved, page.read_text(encoding="utf-8"))
        if count:
            page.write_text(text, encoding="utf-8")
        found += count
    if not found:
        raise ValueError("needed: a page that holds a picture in its text\n   got: none")


def size(png: bytes) -> tuple[int, int]:
    """Return the width and height in pixels from a PNG's first chunk."""
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
