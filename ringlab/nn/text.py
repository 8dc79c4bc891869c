"""Training text as bytes: a file, or modules of the Python standard library, which every machine has.

The library's text differs between Python versions, so `Text.name` contains the version, and results record
this name.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ringlab.errors import TrainingError

MODULES = ("argparse", "bisect", "fractions", "heapq", "random", "statistics", "textwrap")
"""Modules that have long existed and will stay, in the order in which they are read."""


@dataclass(frozen=True)
class Text:
    """A text: its bytes and its name."""

    name: str
    content: bytes

    @cached_property
    def digest(self) -> str:
        """Return the first 12 digits of the content's SHA-256."""
        return hashlib.sha256(self.content).hexdigest()[:12]

    def __len__(self) -> int:
        return len(self.content)


@lru_cache(maxsize=1)
def library() -> Text:
    """Return the source of MODULES as a text. Its name contains the Python version, the bytes and a digest.

    Raises: TrainingError if this Python does not have the source of its library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / f"{name}.py" for name in MODULES]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise TrainingError(
            f"the standard library's source in {folder}",
            f"no {', '.join(missing)}",
            "use a Python with its library, or give train(..., text=Text(name, bytes))",
        )
    content = b"".join(path.read_bytes() for path in paths)
    return Text(f"{len(MODULES)} modules of Python {platform.python_version()}", content)


@lru_cache(maxsize=1)
def documents() -> tuple[Text, ...]:
    """Return the modules in the standard library's top folder, each as a document.

    As in real text, most documents are short and few are long. Their number and lengths depend on the Python
    version.
    Raises: as `library`.
    """
    library()
    folder = Path(sysconfig.get_path("stdlib"))
    return tuple(Text(path.stem, path.read_bytes()) for path in sorted(folder.glob("*.py")))


def from_file(path: Path) -> Text:
    """Return the bytes of a file, with its name.

    Raises: TrainingError if the file cannot be read or is empty.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TrainingError(f"a text at {path}", error.strerror or str(error), "another path") from None
    if not content:
        raise TrainingError("a text of at least 1 byte", f"{path}, which is empty", "another file")
    return Text(path.name, content)


def batch(text: Text, S: int, rows: int, number: int, seed: int = 0) -> Int[Tensor, "B S"]:
    """Return batch `number`: `rows` whole sequences of S bytes from random places in the text, as int64.

    The batch depends only on its number and the seed, so on every rank and after every restart the number is
    enough to continue with the data.

    Raises: TrainingError for a text of fewer than S bytes, or sizes below 1.
    """
    if S < 1 or rows < 1 or len(text) < S:
        raise TrainingError(
            f"at least 1 sequence of 1 to {len(text)} bytes, from {text.name}",
            f"{rows} of {S} bytes",
            "a longer text, or shorter sequences",
        )
    places = np.random.default_rng([seed, number]).integers(0, len(text) - S + 1, size=rows)
    whole = np.frombuffer(text.content, np.uint8)
    return torch.from_numpy(np.stack([whole[place : place + S] for place in places]).astype(np.int64))


def batches(text: Text, S: int, rows: int, seed: int = 0, start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield (number, batch) for all numbers from `start` on, without end. Raises: as `batch`."""
    number = start
    while True:
        yield number, batch(text, S, rows, number, seed)
        number += 1
