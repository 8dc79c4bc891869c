"""The first page's figure as an animation: `python -m tools.website.film` writes docs/ring.gif, which README.md shows.

A browser draws the figure of the page itself: a ring with contiguous shards, then with zig-zag ones on the same axis.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from ringlab_course.builder.build import find_root
from tools.browser import window

from . import playground

WIDTH, HEIGHT = 760, 610
FRAME_MS, HOLD_MS = 160, 1600
"""The time of a frame, and that of the last one of each layout."""
FRAMES = {"contiguous": 18, "zigzag": 10}
"""The number of frames of each layout; both take as long as in the simulation, relative to each other."""
STATIC = Path(__file__).parent / "static"
COLOURS = {
    "color-brand-primary": "#0a5b8c", "color-background-primary": "#ffffff", "color-background-border": "#d9dde2",
    "color-foreground-primary": "#1f2933", "color-foreground-secondary": "#52606d", "color-foreground-muted": "#7b8794",
    "color-foreground-border": "#9aa5b1", "font-stack": "sans-serif", "font-size--small": ".85rem", "header-height": "0px",
}  # fmt: skip


def page(folder: Path) -> Path:
    """Write a page with nothing but the figure, and return its path."""
    figure = playground.embedded("", brief=True)
    (folder / "_static").mkdir()
    for name in re.findall(r"_static/([\w.]+)", figure):
        shutil.copy(STATIC / name, folder / "_static" / name)
    colours = "".join(f"--{name}:{value};" for name, value in COLOURS.items())
    style = f":root{{{colours}}} body{{font:16px sans-serif;margin:12px;color:#1f2933}} .play-player,.play-caption:not(.play-when *){{display:none!important}}"
    path = folder / "figure.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><style>{style}</style><body>{figure}", encoding="utf-8"
    )
    return path


def frames() -> Iterator[tuple[Image.Image, int]]:
    """Yield the pictures, each with the milliseconds for which it is shown."""
    with tempfile.TemporaryDirectory() as name, window() as browser:
        shown = browser.page
        shown.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        shown.emulate_media(reduced_motion="reduce")  # the figure does not move by itself
        shown.goto(page(Path(name)).as_uri())
        for layout, count in FRAMES.items():
            shown.locator(f"#play-layout-{layout}").check()
            for number in range(count + 1):
                shown.locator("#play-time").evaluate(
                    "(slider, at) => { slider.value = at; slider.dispatchEvent(new Event('input')); }",
                    1000 * number / count,
                )
                picture = Image.open(io.BytesIO(shown.screenshot())).convert("RGB")
                yield picture, HOLD_MS if number == count else FRAME_MS


def main() -> None:
    """Write the animation."""
    parser = argparse.ArgumentParser(prog="python -m tools.website.film", description="Write the animation.")
    parser.add_argument("file", nargs="?", type=Path, default=find_root() / "docs" / "ring.gif")
    file = parser.parse_args().file
    pictures, times = zip(*frames(), strict=True)
    palette = pictures[0].quantize(64)
    first, *others = (each.quantize(palette=palette, dither=Image.Dither.NONE) for each in pictures)
    first.save(file, save_all=True, append_images=others, duration=list(times), loop=0, optimize=True)
    print(f"{file}: {len(pictures)} pictures, {sum(times) / 1000:.1f} s, {file.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
