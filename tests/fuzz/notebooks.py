"""Files that may be submitted as a notebook, and properties of the reader's result for each of them."""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from ringlab.errors import CourseError
from ringlab_course.checking.protocol import LIMITS, Frame, pack
from ringlab_course.gradebook.collect import collect
from ringlab_course.judge.submission import CELLS, Submission, UnreadableError, read_submission
from tests.fuzz import frames

SOURCES = (
    "import torch\n",
    "def f(x):\n    return x\n",
    "",
    "%time f()",
    "# é 😀",
    "\ufeffx = 1",
    "x = '\x00'",
    "\ud800",
)
COLLECTED = 50
"""One in so many inputs is also collected from a folder as by the gradebook, which reads the file again."""


def draw(rng: random.Random) -> bytes:
    """Return the bytes of a notebook that is valid, has wrong parts or another encoding, or is damaged."""
    chance = rng.random()
    if chance < 0.004:
        return _large(rng)
    document: Any = {"nbformat": 4, "nbformat_minor": 5, "metadata": _metadata(rng), "cells": [_cell(rng) for _ in range(rng.choice((0, 1, 2, 4)))]}  # fmt: skip
    if rng.random() < 0.6:
        document = frames.spoil(rng, document, rng.choice((1, 1, 2, 4)))
    text = json.dumps(document, ensure_ascii=rng.random() < 0.6)
    if rng.random() < 0.1:
        text = text.replace(
            '"nbformat": 4', rng.choice(('"nbformat": 4, "nbformat": 3', '"nbformat": 4.0', '"nbformat": 04'))
        )
    coding = rng.choice(("utf-8", "utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"))
    data = bytearray(text.encode(coding, "surrogatepass" if coding.startswith("utf") else "replace"))
    if rng.random() < 0.3:
        frames.damage(rng, data, rng.choice((1, 2, 5)))
    return bytes(data)


def _metadata(rng: random.Random) -> Any:
    if rng.random() < 0.4:
        return {}
    return {
        "ringlab": {"exercise": rng.choice(("05", "01", "", "x" * 300, "\ud800"))},
        "kernelspec": {"name": "python3"},
    }


def _cell(rng: random.Random) -> dict[str, Any]:
    source: Any = rng.choice(SOURCES)
    if rng.random() < 0.4:
        source = [rng.choice(SOURCES) for _ in range(rng.choice((0, 1, 3)))]
    metadata = (
        {"grade": rng.choice(("05.forward", "01.attention", "", ".", "x" * 200))}
        if rng.random() < 0.5
        else {}
    )
    kind = rng.choice(("code", "code", "code", "markdown", "raw"))
    return {"cell_type": kind, "source": source, "metadata": metadata, "outputs": [], "execution_count": None}


def _large(rng: random.Random) -> bytes:
    """Return a notebook close to one of the size limits, or one that consists mostly of nesting."""
    much = LIMITS.header // 2 + rng.choice((-40, -3, 0, 40))
    texts = (
        json.dumps({"nbformat": 4, "cells": [{}] * CELLS}),
        json.dumps({"nbformat": 4, "cells": [{}] * (CELLS + 1)}),
        json.dumps({"nbformat": 4, "cells": [{"cell_type": "code", "source": "x" * much}]}),
        json.dumps({"nbformat": 4, "cells": [{"cell_type": "code", "source": ["\\"] * (much // 4)}]}),
        json.dumps({"nbformat": 4, "cells": [], "metadata": {"ringlab": {"exercise": "é" * much}}}),
        '{"nbformat":4,"cells":' + "[" * rng.choice((200, 900, 5000, 100_000)),
        '{"nbformat":4,"cells":[],"metadata":' + '{"a":' * 3000 + "1" + "}" * 3000 + "}",
        '{"nbformat":4,"cells":[],"n":' + "9" * 100_000 + "}",
        '{"nbformat":4,"cells":[' + "[],{},0," * rng.choice((20_000, 400_000)) + "1]}",
        '{"nbformat":4,"cells":[{"cell_type":"code","source":"' + "\\u0000" * 90_000 + '"}]}',
        " " * 200_000 + "{",
    )
    return rng.choice(texts).encode()


_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in memory, if the system has one, because a file there does not wait for a disk."""


def check(data: bytes) -> str:
    """Return "read" or "refused". Raises: AssertionError, or any error that the reader must not raise."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_MEMORY) as folder:
        path = Path(folder) / "handed_in.ipynb"
        path.write_bytes(data)
        if len(data) % COLLECTED == 0:
            _collected(path)
        return _checked(path)


def _checked(path: Path) -> str:
    try:
        submission = read_submission(path)
    except UnreadableError as error:
        assert error.got and str(error).encode("utf-8"), "a refusal has a reason that can be displayed"
        return "refused"
    _obeys(submission)
    return "read"


def _obeys(submission: Submission) -> None:
    assert isinstance(submission, Submission) and isinstance(submission.cells, tuple)
    assert len(submission.cells) <= CELLS, "there are too many cells"
    for cell in submission.cells:
        assert type(cell.source) is str and type(cell.code) is bool, "a cell has fields of a wrong type"
        assert cell.grade is None or type(cell.grade) is str, "a cell's grade is no text"
    exercise = submission.exercise
    assert exercise is None or (type(exercise) is str and len(exercise) <= 64), (
        "the exercise's name is no text, or too long"
    )
    assert len(submission.code) == len(submission.cells) and type(submission.mentions_torch) is bool
    assert sum(len(source.encode("utf-8")) for source in submission.code) <= LIMITS.header // 2, (
        "too much code"
    )
    pack(
        Frame("load", {"call": 0, "functions": ["f"]}, submission.code)
    )  # checks that the judge can send the code to a worker


def _collected(path: Path) -> None:
    """Check that collecting a class does not fail because of this notebook."""
    try:
        found = collect([path.parent])
    except CourseError:
        raise AssertionError("one notebook stops the look at a class") from None
    assert len(found.submissions) == 1, f"{len(found.submissions)} submissions of one notebook"
