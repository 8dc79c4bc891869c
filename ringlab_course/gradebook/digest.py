"""What identifies a notebook as it was handed in: the SHA-256 of its bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from ringlab_course.judge.submission import FILE_BYTES

OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EINTR, errno.ENOENT}
"""Errors of opening a file that are this machine's fault, or pass: nobody gets a zero for them."""


def digest_of(path: Path) -> str:
    """Return what changes when the file does: of its bytes, or where it is no notebook of what it is instead.

    Links are not followed, and of a file that is too large nothing is read.
    Raises: OSError where this machine fails to read what is there.
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
