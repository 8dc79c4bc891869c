"""The look at links finds what is planted, and nothing in pages that are sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.website import links

SOUND = {
    "index.html": '<link rel="stylesheet" href="style.css"><h1 id="top-of-all">A</h1>'
    '<a href="more/page.html#part">x</a><a href="#top-of-all">y</a><a href="https://arxiv.org/abs/2310.01889">z</a>'
    '<img src="data:image/png;base64,AA=="><a href="more/">folder</a><script>fetch("searchindex.js")</script>',
    "more/page.html": '<a name="part"></a><a href="../index.html">back</a><link rel="next" href="../index.html">',
    "more/index.html": "<p>list</p>",
    "style.css": "body { background: url(data:image/png;base64,AA==) }",
}
PLANTED = {
    "a link to a page that is not there": (
        "index.html",
        '<a href="gone.html">x</a>',
        "links to gone.html, which is not there",
    ),
    "a link out of the pages": ("index.html", '<a href="../secret.html">x</a>', "links to ../secret.html"),
    "a link to a place that is not there": (
        "more/page.html",
        '<a href="../index.html#nowhere">x</a>',
        "no such place",
    ),
    "a link to a place on its own page": ("index.html", '<a href="#nowhere">x</a>', "no such place"),
    "a passive link that is broken": (
        "index.html",
        '<link rel="prev" href="gone.html">',
        "links to gone.html",
    ),
    "a script of a CDN": (
        "index.html",
        '<script src="https://cdn.example/x.js"></script>',
        "loads https://cdn",
    ),
    "a script without a scheme": ("index.html", '<script src="//cdn.example/x.js"></script>', "loads //cdn"),
    "a script that is not there": (
        "index.html",
        '<script src="x.js"></script>',
        "loads x.js, which is not there",
    ),
    "a style of a CDN": (
        "index.html",
        '<link rel="stylesheet" href="https://cdn.example/x.css">',
        "loads https",
    ),
    "a hint to connect": (
        "index.html",
        '<link rel="preconnect" href="https://fonts.example">',
        "loads https",
    ),
    "a picture from elsewhere": ("more/page.html", '<img src="http://example.org/x.png">', "loads http"),
    "one of several pictures": (
        "index.html",
        '<img srcset="style.css 1x, http://example.org/x.png 2x">',
        "loads http",
    ),
    "a font": (
        "style.css",
        "@font-face { src: url('https://fonts.example/x.woff2') }",
        "loads https://fonts",
    ),
    "an imported style": ("style.css", '@import "https://cdn.example/x.css";', "loads https://cdn"),
    "a style in the page": ("index.html", "<style>@import url(//cdn.example/x.css)</style>", "loads //cdn"),
    "a style of one element": ("index.html", '<p style="background: url(http://e.org/x.png)">', "loads http"),
    "a fetch": ("index.html", "<script>fetch('https://api.example/x')</script>", "loads https://api"),
    "a frame": ("index.html", '<iframe src="https://example.org"></iframe>', "loads https"),
    "a page that moves on": (
        "index.html",
        '<meta http-equiv="refresh" content="0; url=https://example.org">',
        "loads https",
    ),
}


def write(folder: Path) -> Path:
    for name, text in SOUND.items():
        path = folder / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "site"


def test_sound_pages_pass(tmp_path: Path) -> None:
    assert links.problems(write(tmp_path)) == []


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(tmp_path: Path, name: str) -> None:
    file, planted, message = PLANTED[name]
    folder = write(tmp_path)
    (tmp_path / "secret.html").write_text("not a page")
    with (folder / file).open("a") as page:
        page.write(planted)
    (found,) = links.problems(folder)
    assert found.startswith(f"{file}: ") and message in found


def test_a_folder_without_pages_is_no_success(tmp_path: Path) -> None:
    assert links.problems(tmp_path) == [f"{tmp_path}: no page"]
