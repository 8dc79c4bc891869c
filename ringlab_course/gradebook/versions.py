"""The inputs of a result: the version of the checks, the seed of the probes, and the notebook's SHA-256."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import ringlab_course
from ringlab.errors import CourseError
from ringlab_course.checking.loading import folder_of
from ringlab_course.judge.submission import FILE_BYTES

_HOME = Path(ringlab_course.__file__).resolve().parents[1]

_IMPORT = re.compile(
    r"^\s*(?:from|import) (ringlab_course\.(?:exercises|checking)\.[\w.]+)(?: import (?:\(([^)]*)\)|(.*)))?",
    re.M,
)
"""Imports are found by this pattern, because parsing the sources for every submission would take too long."""


_UNSAFE = "+unsafe"


def contract_version(exercise: str, *, unsafe: bool = False) -> str:
    """Return the version of the checks of `exercise`, or "" for no exercise.

    It is a hash of the checks' sources and of the modules that they import. Results without a sandbox have
    another version, so that they are graded again where there is a sandbox.
    """
    digest = hashlib.sha256()
    for path in _sources(exercise) if exercise else ():
        digest.update(path.relative_to(_HOME).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return (f"{exercise}-{digest.hexdigest()[:16]}" if exercise else "") + (_UNSAFE if unsafe else "")


def is_unsafe(contract: str) -> bool:
    """Return whether the version `contract` belongs to a result without a sandbox."""
    return contract.endswith(_UNSAFE)


class Today:
    """The current versions of the checks; each exercise's version is computed once."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, bool], str] = {}

    def differs(self, exercise: str, contract: str) -> bool:
        """Return whether a result with the version `contract` comes from checks other than the current ones.

        It is False for a result without a version (an instructor's override alone) or of an exercise that no
        longer exists.
        """
        key = exercise, is_unsafe(contract)
        if contract and key not in self._versions:
            try:
                self._versions[key] = contract_version(exercise, unsafe=key[1])
            except CourseError:
                self._versions[key] = contract
        return bool(contract) and self._versions[key] != contract


def _sources(exercise: str) -> list[Path]:
    """Return the source files of an exercise's checks, and of all course modules that they import."""
    found: set[Path] = set()
    waiting = [path for path in folder_of(exercise).iterdir() if path.suffix in (".py", ".md")]
    waiting = [path for path in waiting if path.name != "exercise.py"]
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file():
            found.add(path)
            waiting += _imported(path.read_text(encoding="utf-8")) if path.suffix == ".py" else ()
    return sorted(found)


def _imported(source: str) -> Iterator[Path]:
    """Yield the files of the modules that a source may import."""
    for module, several, names in _IMPORT.findall(source):
        place = _HOME.joinpath(*module.split("."))
        yield place.with_suffix(".py")
        yield from (place / f"{name}.py" for name in re.findall(r"\w+", several or names))


def seed_of(class_seed: int, learner: str, exercise: str, digest: str) -> int:
    """Return the seed of the probes for one submission, 64 bits; it is the same whenever this file is graded.

    A changed notebook has another digest and gets new probes, so knowledge of earlier probes does not help.
    """
    text = "\0".join((str(class_seed), learner, exercise, digest))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EINTR, errno.ENOENT}
"""Errors of opening a file that are temporary or this machine's fault; nobody gets a zero for them."""


def digest_of(path: Path) -> str:
    """Return the SHA-256 of the file's bytes or, if it is not a regular file, of a description of it.

    Links are not followed. A file that is too large is not read.
    Raises: OSError if this machine fails to read the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in OURS:
            raise
        instead = os.readlink(path) if path.is_symlink() else errno.errorcode.get(error.errno or 0, "")
        return _hashed(b"not opened: " + os.fsencode(instead))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return _hashed(b"no file")
        if status.st_size > FILE_BYTES:
            return _hashed(f"too large: {status.st_size}, {status.st_mtime_ns}".encode())
        with open(descriptor, "rb", closefd=False) as file:
            return _hashed(file.read(FILE_BYTES))
    finally:
        os.close(descriptor)


def _hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
