"""Pictures that pages held in their text are files, whose size is known before they are loaded."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import matplotlib.image as image
import numpy as np
import pytest

from tests.browser.window import Window
from tools.website import pictures


def write(path: Path, width: int, height: int) -> bytes:
    image.imsave(path, np.zeros((height, width, 3)))
    data = path.read_bytes()
    path.unlink()
    return data


def test_a_held_picture_becomes_a_file_with_its_size(tmp_path: Path) -> None:
    (tmp_path / pictures.FOLDER).mkdir()
    page = tmp_path / "docs/guide/page.html"
    page.parent.mkdir(parents=True)
    data = write(tmp_path / "x.png", width=7, height=3)
    text = f'<img alt="a" src="data:image/png;base64,{base64.b64encode(data).decode()}" style="b">'
    page.write_text(f"<p>{text}{text}</p>")
    pictures.move(tmp_path)
    (source,) = {*re.findall(r'src="([^"]+)"', page.read_text())}
    assert (page.parent / source).read_bytes() == data
    assert (
        page.read_text().count(f'<img alt="a" src="{source}" loading="lazy" width="7" height="3" style="b">')
        == 2
    )


def test_pages_without_held_pictures_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<img src="other.png">')
    with pytest.raises(ValueError, match="needed: a page that holds a picture"):
        pictures.move(tmp_path)


@pytest.mark.slow
@pytest.mark.needs_chromium
def test_frames_are_loaded_once_somebody_plays(site: Path, browser: Window) -> None:
    page = browser.page
    page.goto((site / "notebooks/09_backward_ring.html").as_uri())
    frames = page.locator("[data-frames] img")
    loaded = "all => all.map(each => each.complete && each.naturalWidth > 0)"
    assert frames.count() > 2 and not any(frames.evaluate_all(loaded)[1:])
    page.locator("[data-frames]").get_by_role("slider").press("ArrowRight")
    page.wait_for_function(f"({loaded})([...document.querySelectorAll('[data-frames] img')]).every(Boolean)")
