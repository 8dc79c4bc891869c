"""The function that a text defines, and a text with a few changes: a patient's program, or one that a learner mended by halves."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ringlab_course.clinic import bedside

Changes = tuple[tuple[str, str], ...]
"""(old, new) pairs, made one after the other; each `old` stands in the text exactly once."""


def edited(text: str, changes: Changes) -> str:
    """Return `text` with the changes made. Raises: ValueError unless each of them applies exactly once."""
    for old, new in changes:
        if (count := text.count(old)) != 1:
            raise ValueError(f"needed {old!r} once in the program, got it {count} times")
        text = text.replace(old, new)
    return text


def program_of(
    text: str, name: str, state: str = "as it is", words: ModuleType = bedside
) -> Callable[..., Any]:
    """Return the function `name` that the text defines, with the helpers in `words`; tracebacks quote it as in this state."""
    place = f"<{name} {state}>"
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    space = vars(words) | {"math": math, "torch": torch, "__name__": f"{__name__}.{name}"}
    exec(compile(text, place, "exec"), space)
    program: Callable[..., Any] = space[name]
    return program
