"""Data that the search needs besides Sphinx's index: how often each page contains a word, and error texts.

search_scorer.js uses these data.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish

from . import errors

INDEX = "searchindex.js"
_PREFIX, _SUFFIX = "Search.setIndex(", ")"
_LANGUAGE = SearchEnglish({})
_NO_TEXT = re.compile(r"<(style|script)\b.*?</\1>|<[^>]+>", re.DOTALL)


def write(site: Path, root: Path) -> None:
    """Add word counts, page lengths and the checkout's error texts to the index of the built pages."""
    path = site / INDEX
    index = json.loads(path.read_text(encoding="utf-8").removeprefix(_PREFIX).removesuffix(_SUFFIX))
    pages = [words(site / f"{name}.html") for name in index["docnames"]]
    known = {*index["terms"], *index["titleterms"]}
    counts: dict[str, dict[int, int]] = {}
    for number, page in enumerate(pages):
        for word, count in page.items():
            if count > 1 and word in known:
                counts.setdefault(word, {})[number] = count
    said = {
        text
        for message in errors.messages(root)
        for text in (message.needed, message.got, message.remedy)
        if text
    }
    more: dict[str, Any] = {
        "counts": counts,
        "lengths": [page.total() for page in pages],
        "errors": sorted(said),
    }
    text = json.dumps(index | more, separators=(",", ":"), ensure_ascii=False)
    path.write_text(_PREFIX + text + _SUFFIX, encoding="utf-8")


def words(page: Path) -> Counter[str]:
    """Return how often each word is in the text of a page, with words stemmed as in the search."""
    text = page.read_text(encoding="utf-8")
    article = text[text.index("<article") : text.rindex("</article>")]
    return Counter(map(_stem, _LANGUAGE.split(html.unescape(_NO_TEXT.sub(" ", article)))))


@cache
def _stem(word: str) -> str:
    return _LANGUAGE.stem(word.lower())
