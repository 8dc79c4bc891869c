"""Names of files as text: one line, no control characters, and never the same text for two names."""

from __future__ import annotations

import os


def shown_name(name: str | os.PathLike[str]) -> str:
    r"""Return `name` as text that can be printed, stored and compared.

    What does not print, bytes that are not UTF-8, and the backslash are written as escapes, so that
    two names never become one text.

    >>> print(shown_name("ada"), shown_name("a\nb"), shown_name("a\\nb"))
    ada a\nb a\\nb
    """
    return "".join(map(_escaped, os.fspath(name)))


def _escaped(character: str) -> str:
    # Surrogates, which stand for bytes that are not UTF-8, do not print.
    if character.isprintable() and character != "\\":
        return character
    return character.encode("unicode_escape").decode("ascii")
