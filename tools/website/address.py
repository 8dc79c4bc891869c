"""Writes the pages' address on the web into the sitemap and into the head of each page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from urllib.parse import quote, urljoin

from . import source
from .preview import HEIGHT, NAME, WIDTH

NOT_FOR_SEARCH = ("search.html", "genindex.html", "py-modindex.html")


def check(address: str) -> None:
    """Raise SystemExit unless the address is whole."""
    if not address.startswith(("https://", "http://")):
        raise SystemExit(f"needed: an address such as https://ringlab.example/\n   got: {address}")


def write(site: Path, address: str) -> None:
    """Write sitemap.xml, and write into every page its address and its picture for previews."""
    base = address.rstrip("/") + "/"
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    found = (
        page for page in pages if page not in NOT_FOR_SEARCH and not page.startswith(f"{source.FOLDER}/")
    )
    listed = [urljoin(base, quote(page)) for page in found]
    entries = "".join(f"<url><loc>{escape(each)}</loc></url>\n" for each in listed)
    (site / "sitemap.xml").write_text(
        f'<?xml version="1.0" encoding="utf-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{entries}</urlset>\n',
        encoding="utf-8",
    )
    for page in pages:
        path = site / page
        head = _head(urljoin(base, quote(page)), urljoin(base, NAME))
        path.write_text(
            path.read_text(encoding="utf-8").replace("</head>", f"{head}</head>", 1), encoding="utf-8"
        )


def _head(address: str, picture: str) -> str:
    properties = {
        "og:url": address,
        "og:image": picture,
        "og:image:width": str(WIDTH),
        "og:image:height": str(HEIGHT),
    }
    metas = "".join(
        f'<meta property="{name}" content="{escape(value)}">' for name, value in properties.items()
    )
    return f'<link rel="canonical" href="{escape(address)}">{metas}<meta name="twitter:card" content="summary_large_image">'
