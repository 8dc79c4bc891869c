"""The link check finds planted errors, and nothing in sound pages.

Other tests cover texts that the builder must not publish, and inputs that it refuses.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from ringlab_course.builder.sources import Target, targets
from tools.website import __main__ as website
from tools.website import links, notebooks

pytestmark = pytest.mark.thorough

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
    "a picture from elsewhere": ("more/page.html", '<img src="http://example.org/x.png">', "loads http"),
    "a font": (
        "style.css",
        "@font-face { src: url('https://fonts.example/x.woff2') }",
        "loads https://fonts",
    ),
    "a fetch": ("index.html", "<script>fetch('https://api.example/x')</script>", "loads https://api"),
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


CHECKOUT = Path(__file__).resolve().parents[2]


def test_what_a_learner_wrote_is_not_published(tmp_path: Path) -> None:
    """The page comes from the source, not from a learner's file, and has a place for each stage."""
    (target,) = (t for t in targets(CHECKOUT, ("exercises/05",)) if t.kind == "exercise")
    page = notebooks.exercise_page(
        Target(target.kind, target.slug, target.source, tmp_path / "edited.ipynb"), CHECKOUT
    )
    text = "\n".join(cell.source for cell in page.cells)
    assert text.count("NotImplementedError") == 3
    assert [text.count(f"(stage-05-{name})=\n## 05.{name}") for name in ("step", "forward", "causal")] == [
        1,
        1,
        1,
    ]


def test_a_picture_without_a_description_is_refused(tmp_path: Path) -> None:
    (target,) = (t for t in targets(CHECKOUT, ("notebooks/05",)) if t.kind == "lesson")
    notebook = nbformat.read(target.path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    next(o for o in outputs if "image/png" in o.get("data", {})).metadata = {}
    nbformat.write(notebook, tmp_path / "bare.ipynb")
    with pytest.raises(ValueError, match="pictures with descriptions"):
        notebooks.lesson_page(Target("lesson", target.slug, target.source, tmp_path / "bare.ipynb"), None)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds something else"):
        website.build(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
