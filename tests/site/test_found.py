"""Pages can be found: by their own search, by search engines, and through links that people share."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import quote

import matplotlib.image
import pytest

from tools.browser import Window
from tools.website import address as where
from tools.website import preview, repository

pytestmark = [pytest.mark.thorough, pytest.mark.slow]
CHECKOUT = Path(__file__).resolve().parents[2]


def test_pages_that_know_their_address_have_a_sitemap_and_a_picture_for_previews(
    site: Path, tmp_path: Path
) -> None:
    assert not (site / "sitemap.xml").exists() and 'rel="canonical"' not in (site / "index.html").read_text()
    for name in ("index.html", "docs/labs.html", "search.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(site / name, tmp_path / name)
    where.write(tmp_path, "https://ringlab.example/course")
    listed = re.findall("<loc>(.*?)</loc>", (tmp_path / "sitemap.xml").read_text())
    assert listed == [f"https://ringlab.example/course/{name}" for name in ("docs/labs.html", "index.html")]
    head = (tmp_path / "docs/labs.html").read_text().partition("</head>")[0]
    assert f'<link rel="canonical" href="{listed[0]}">' in head
    (picture,) = re.findall('"og:image" content="https://ringlab.example/course/(.*?)"', head)
    assert matplotlib.image.imread(site / picture).shape[:2] == (preview.HEIGHT, preview.WIDTH)
    with pytest.raises(SystemExit, match="needed: an address"):
        where.check("ringlab.example")


def test_pages_that_know_their_repository_can_be_edited_at_their_source(site: Path, tmp_path: Path) -> None:
    edited = dict(repository.sources(CHECKOUT))
    assert edited["notebooks/05_emulated_ring.html"] == "ringlab_course/lessons/05_emulated_ring.py"
    assert edited["docs/guide/masks.html"] == "docs/guide/masks.md" and "docs/cli.html" not in edited
    for page, source in edited.items():
        assert (CHECKOUT / source).is_file(), source
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(site / page, tmp_path / page)
        assert "/edit/" not in (site / page).read_text(encoding="utf-8")
    repository.write(tmp_path, "https://code.example/ringlab.git", CHECKOUT)
    for page, source in edited.items():
        address = f'href="https://code.example/ringlab/edit/main/{source}"'
        assert (tmp_path / page).read_text(encoding="utf-8").count(address) == 1
    with pytest.raises(SystemExit, match="needed: the address of a repository"):
        repository.check("code.example/ringlab")


@pytest.mark.needs_chromium
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("zigzag", "notebooks/08_striped_and_zigzag"),
        ("ppermute", "notebooks/17_ring_in_jax"),
        ("deadlock", "notebooks/11_real_processes"),
        ("lse", "notebooks/02_online_softmax"),
        ("cu_seqlens", "docs/guide/packed"),
        ("MLA", "docs/guide/schedules"),
        ("how many hops", "notebooks/06_what_it_costs"),
        ("they wait for a rank that has finished", "errors"),
        ("tokens that rank 1 owns under zigzag", "errors"),
        ("GQA bytes", "notebooks/01_naive_attention"),
        ("install windows", "docs/guide/install"),
        ("colab", "docs/guide/install"),
        ("ringlab.oracle.attention", "api/ringlab"),
    ],
)
def test_the_search_shows_first_what_is_asked_for(
    site: Path, address: str, browser: Window, query: str, page: str
) -> None:
    browser.page.goto(f"{address}/search.html?q={quote(query)}")
    first = browser.page.locator("ul.search li a").first
    first.wait_for()
    assert first.get_attribute("href").partition("#")[0] == f"{page}.html"  # type: ignore[union-attr]


@pytest.mark.needs_chromium
@pytest.mark.parametrize("way", ["http", "file"])
def test_the_search_works_without_a_network(site: Path, address: str, browser: Window, way: str) -> None:
    base = address if way == "http" else site.as_uri()
    browser.complaints.clear()
    browser.page.goto(f"{base}/search.html?q=zig-zag")
    # Results arrive one by one; this test is not about their order.
    browser.page.locator("ul.search li a", has_text="Striped and zig-zag").first.wait_for()
    assert browser.complaints == []
