"""A second build reads and writes only what has changed since the first."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.website import __main__ as website
from tools.website import stage

pytestmark = [pytest.mark.thorough, pytest.mark.slow]

CHECKOUT = Path(__file__).resolve().parents[2]
TEXTS = {
    "index.md": "# First\n\n```{toctree}\na\nb\n```\n",
    "a.md": "# A\n\nA sentence.\n",
    "b.md": "# B\n\nA link to [a](a.md).\n",
}


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], set[str]]:
    """Return a function that builds pages from texts, and returns the names of the pages that were written."""
    before: dict[Path, int] = {}
    monkeypatch.setattr(website, "SETTINGS", shutil.copytree(website.SETTINGS, tmp_path / "settings"))

    def build(texts: dict[str, str]) -> set[str]:
        monkeypatch.setattr(stage, "_texts", lambda root, repository: texts.items())
        pages = website.made(tmp_path / "kept", CHECKOUT)
        now = {path: path.stat().st_mtime_ns for path in pages.rglob("*.html")}
        written = {path.stem for path in now if before.get(path) != now[path]}
        before.clear()
        before.update(now)
        return written - {"genindex", "search"}

    return build


def test_only_what_changed_is_built_again(built: Callable[[dict[str, str]], set[str]]) -> None:
    assert built(TEXTS) == {"index", "a", "b"}
    assert built(TEXTS) == set()
    edited = TEXTS | {"a.md": "# A\n\nAnother sentence.\n"}
    assert built(edited) == {"a", "index"}  # Sphinx writes the page that lists it again, too
    (website.SETTINGS / "static" / "site.css").write_text("p { color: red }")
    assert built(edited) == {"index", "a", "b"}  # because pages name the version of each style sheet
    titled = TEXTS | {"a.md": "# Z\n\nAnother sentence.\n"}
    assert built(titled) == {"index", "a", "b"}  # because every page shows all titles
    without = {"index.md": "# First\n\n```{toctree}\nb\n```\n", "b.md": "# B\n"}
    assert built(without) == {"index", "b"}


def test_a_link_to_a_place_that_is_gone_fails_the_build(
    built: Callable[[dict[str, str]], set[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    linked = TEXTS | {"a.md": "# A\n\n(there)=\n## Place\n", "b.md": "# B\n\nTo [a place](#there).\n"}
    built(linked)
    with pytest.raises(SystemExit):
        built(linked | {"a.md": "# A\n\nA sentence.\n"})
    assert "'there'" in capfd.readouterr().err
