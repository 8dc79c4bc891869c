"""Edit the text of a patient's program, and make a function from the edited text."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ringlab_course.clinic import bedside

Changes = tuple[tuple[str, str], ...]
"""(old, new) pairs, applied one after the other. The text contains each `old` exactly once."""


def edited(text: str, changes: Changes) -> str:
    """Return `text` with the changes applied. Raises: ValueError unless each change applies exactly once."""
    for old, new in changes:
        if (count := text.count(old)) != 1:
            raise ValueError(f"the program should contain {old!r} exactly once, got it {count} times")
        text = text.replace(old, new)
    return text


def program_of(
    text: str, name: str, state: str = "as it is", words: ModuleType = bedside
) -> Callable[..., Any]:
    """Return the function `name` that the text defines.

    words: the module with the helpers that the text calls. state: what tracebacks print after the function's
    name.
    """
    place = f"<{name} {state}>"
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    space = vars(words) | {"math": math, "torch": torch, "__name__": f"{__name__}.{name}"}
    exec(compile(text, place, "exec"), space)
    program: Callable[..., Any] = space[name]
    return program
