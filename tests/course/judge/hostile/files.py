"""Files that are no notebooks, and changed notebooks, by kind and name, each with the expected result."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RIGHT = "def double(x):\n    return 2 * x\n"
WRONG = "def double(x):\n    return x\n"
BIG = 31 << 20


@dataclass(frozen=True)
class File:
    """A way to make a file, the points that it earns out of five, and a part of the message about it."""

    make: Callable[[Path], Any]
    earned: int
    told: str


def code(source: Any = RIGHT, grade: Any = "90.double", **more: Any) -> dict[str, Any]:
    """Return a code cell."""
    cell = {"cell_type": "code", "source": source, "outputs": [], "execution_count": None, **more}
    return {"metadata": {"grade": grade} if grade is not None else {}, **cell}


def document(*cells: Any, **more: Any) -> dict[str, Any]:
    """Return a notebook."""
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": list(cells), **more}


def of(*cells: Any, earned: int = 5, told: str = "", **more: Any) -> File:
    """Return a `File` that is a notebook with these cells."""
    return raw(json.dumps(document(*cells, **more)).encode(), earned, told)


def raw(data: bytes, earned: int = 0, told: str = "") -> File:
    """Return a `File` with these bytes as its content."""
    return File(lambda path: path.write_bytes(data), earned, told)


def large(data: Callable[[], bytes], earned: int = 0, told: str = "") -> File:
    """Return a `File` of many megabytes. To save memory, its content is made when the file is written."""
    return File(lambda path: path.write_bytes(data()), earned, told)


def _holes(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(10 << 30)


def _link_to_a_right_one(path: Path) -> None:
    other = path.with_name("other.json")
    other.write_text(json.dumps(document(code())))
    path.symlink_to(other)


def _link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # because a socket's path must be short
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


GOOD = json.dumps(document(code()))
LINK = "a symbolic link: hand in the notebook itself"
BROKEN = "broken JSON: save the notebook in JupyterLab"
ENCODING = "text that is not UTF-8: save the notebook in JupyterLab"
NO_FUNCTION = "there is no function `double` in the notebook"
MAGIC = "it holds a magic or shell line"
OUTPUT = {"output_type": "stream", "name": "stdout", "text": "all checks passed: 5 of 5 points\n"}
SCRIPT = {"output_type": "display_data", "metadata": {}, "data": {"text/html": "<script>alert(5)</script>"}}

FILES: dict[str, dict[str, File]] = {
    "symlinked or enormous notebooks": {
        "a link to the accounts": File(lambda path: path.symlink_to("/etc/passwd"), 0, LINK),
        "a link to a right notebook": File(_link_to_a_right_one, 0, LINK),
        "a link to itself": File(lambda path: path.symlink_to(path.name), 0, LINK),
        "a link to nothing": File(lambda path: path.symlink_to("nothing"), 0, LINK),
        "a link to a device": File(lambda path: path.symlink_to("/dev/zero"), 0, LINK),
        "a link to a pipe": File(_link_to_a_pipe, 0, LINK),
        "a pipe": File(os.mkfifo, 0, "something that is not a file"),
        "a socket": File(_socket, 0, "a file that cannot be opened"),
        "a folder": File(Path.mkdir, 0, "something that is not a file"),
        "ten gigabytes of holes": File(_holes, 0, "10240 MiB: clear the outputs before handing in"),
        "thirty-three megabytes of spaces": large(lambda: b" " * (33 << 20) + GOOD.encode(), 0, "33 MiB"),
        "thirty-one megabytes of brackets": large(lambda: b"[" * BIG, 0, "too many small parts"),
        "thirty-one megabytes of code": large(
            lambda: json.dumps(document(code("x" * BIG))).encode(), 0, "bytes of code"
        ),
        "thirty-one megabytes of output": large(
            lambda: json.dumps(document(code(outputs=[{**OUTPUT, "text": "x" * (30 << 20)}]))).encode(), 5
        ),
        "five thousand and one cells": of(*[{}] * 5001, earned=0, told="more than 5000 cells"),
    },
    "broken JSON": {
        "nothing": raw(b"", 0, BROKEN),
        "cut off": raw(GOOD[:-20].encode(), 0, BROKEN),
        "a comma too many": raw(GOOD[:-1].encode() + b",}", 0, BROKEN),
        "brackets within brackets": raw(b'{"cells": ' + b"[" * 100_000, 0, BROKEN),
        "two notebooks in one": raw(GOOD.encode() * 2, 0, BROKEN),
        "a number of ten thousand digits": raw(
            b'{"nbformat": ' + b"4" * 10_000 + b', "cells": []}', 0, BROKEN
        ),
        "null": raw(b"null", 0, "JSON that is not a notebook"),
        "a list": raw(b"[]", 0, "JSON that is not a notebook"),
        "cells that are an object": raw(b'{"nbformat": 4, "cells": {}}', 0, "JSON that is not a notebook"),
        "a cell that is a number": of(5, earned=0, told="a cell that is not a JSON object"),
        "a source that is a number": of(code(5), earned=0, told="a cell whose source is not text"),
        "the key of the cells twice": raw(
            GOOD[:-1].encode() + b', "cells": ' + json.dumps([code(WRONG)]).encode() + b"}", 0, "wrong values"
        ),
        "the third format": of(
            code(), earned=0, nbformat=3, told="notebook format 3: open and save it in JupyterLab"
        ),
        "the fifth format": of(code(), earned=0, nbformat=5, told="notebook format 5"),
        "a format that is text": of(code(), earned=0, nbformat="4", told="notebook format"),
        "a format that is not a number": raw(
            GOOD.replace('"nbformat": 4', '"nbformat": NaN').encode(), 0, "notebook format nan"
        ),
    },
    "non-UTF-8": {
        "Latin-1": raw(GOOD.replace("def", "# é\\n def").encode("latin-1"), 0, ENCODING),
        "UTF-16": raw(GOOD.encode("utf-16"), 0, ENCODING),
        "UTF-16 without a mark": raw(GOOD.encode("utf-16-le"), 0, BROKEN),
        "a zero in two bytes": raw(
            GOOD.replace("def", "#\0\ndef").encode().replace(b"\0", b"\xc0\x80"), 0, ENCODING
        ),
        "a mark at its beginning": raw(b"\xef\xbb\xbf" + GOOD.encode(), 5, ""),
        "zero bytes": raw(GOOD.replace("def", "#\0def").encode(), 0, BROKEN),
        "a zero in the code": of(code("#\0\n" + RIGHT), earned=0, told=NO_FUNCTION),
        "half a letter in the code": of(code("# \ud800\n" + RIGHT), earned=0, told="lone surrogates"),
        "half a letter in an output": of(code(outputs=[{**OUTPUT, "text": "\ud800"}])),
        "letters that look alike": of(
            code(RIGHT.replace("double", "d\u043euble")), earned=0, told=NO_FUNCTION
        ),
    },
    "duplicated, renamed, retyped or missing cells": {
        "twice, the last one wrong": of(code(), code(WRONG), earned=0, told="wrong values"),
        "twice, the last one right": of(code(WRONG), code()),
        "five thousand times": of(*[code()] * 4999, earned=5),
        "another name": of(code(RIGHT.replace("double", "twice")), earned=0, told=NO_FUNCTION),
        "as Markdown": of(
            {**code(), "cell_type": "markdown"},
            earned=0,
            told="is no longer a code cell: change its type back",
        ),
        "as raw text": of(
            {**code(), "cell_type": "raw"}, earned=0, told="is no longer a code cell: change its type back"
        ),
        "as nothing at all": of({**code(), "cell_type": None}, earned=0, told="is no longer a code cell"),
        "not there": of(code("x = 1", None), earned=0, told=NO_FUNCTION),
        "no cell": of(earned=0, told=NO_FUNCTION),
        "in another cell": of(code(RIGHT, None), code("x = 1")),
        "deleted again": of(code(), code("del double"), earned=0, told=NO_FUNCTION),
        "made a number": of(code(), code("double = 5"), earned=0, told=NO_FUNCTION),
        "made another's": of(code(), code("double = print"), earned=0, told="None"),
        "made a coroutine": of(code("async " + RIGHT), earned=0, told="should answer with arrays"),
        "the same id for every cell": of(code(id="a"), code("x = 1", None, id="a")),
        "with attachments": of(code(attachments={"a.png": {"image/png": "A" * 10**6}})),
        "in pieces": of(code(RIGHT.splitlines(True))),
    },
    "output-only edits": {
        "says that it passed": of(
            code(WRONG, outputs=[OUTPUT], execution_count=1), earned=0, told="wrong values"
        ),
        "has a script in its output": of(code(WRONG, outputs=[SCRIPT]), earned=0, told="wrong values"),
        "has outputs that are none": of(code(outputs="passed", execution_count={"points": 5})),
        "gives itself a hundred points": of(
            code(
                WRONG,
                metadata={"grade": "90.double", "points": 100, "nbgrader": {"points": 100, "grade": True}},
            ),
            earned=0,
            told="wrong values",
            metadata={"ringlab": {"exercise": "90", "points": 100, "earned": 100}},
        ),
        "is right and gives itself more": of(code(metadata={"grade": "90.double", "points": 100})),
        "names another stage": of(code(grade="90.other")),
        "names another exercise": of(code(grade="01.scores"), metadata={"ringlab": {"exercise": "01"}}),
        "is graded as a list": of(code(grade=["90.double"])),
        "has no metadata": of({"cell_type": "code", "source": RIGHT}),
    },
    "magic and shell cells": {
        "runs the accounts": of(code("%run /etc/passwd\n", None), code()),
        "runs a shell": of(code("%%bash\ntouch @MARK@\n", None), code()),
        "writes a file": of(code("%%writefile @MARK@\nx\n", None), code()),
        "touches a file": of(code("!touch @MARK@", None), code()),
        "asks for help": of(code("double?", None), code("??double", None), code()),
        "hides a command behind a line that goes on": of(code("x = \\\n!touch @MARK@", None), code()),
        "asks the notebook for a shell": of(
            code("import IPython\nIPython.get_ipython().system('touch @MARK@')", None), code()
        ),
        "needs a command for its answer": of(
            code("FOUR = !echo 4", None),
            code("def double(x):\n    return x * FOUR / 2"),
            earned=0,
            told="ValueError",  # in a worker, FOUR is an empty list
        ),
        "times itself": of(code("%%time\n" + RIGHT)),
        "has a command in the middle": of(code(RIGHT + "!touch @MARK@\n")),
        "writes itself": of(code("%%writefile double.py\n" + RIGHT), earned=0, told=MAGIC),
    },
}
