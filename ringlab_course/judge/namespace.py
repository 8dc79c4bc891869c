"""What a process that was forked inside a sandbox does to be alone in one of its own.

The fork server (fork_server.py) calls these in a child, before it serves any submission. Each step is a system call; one
that fails raises OSError, and the child ends. bubblewrap does the same for a process that it starts.
Source: namespaces(7), user_namespaces(7), mount_namespaces(7), capabilities(7), prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from ringlab_course.judge.launcher import become

NOBODY = 65534
SCRATCH = "/tmp"
_NAMESPACES = {
    "CLONE_NEWNS": 0x00020000, "CLONE_NEWCGROUP": 0x02000000, "CLONE_NEWUTS": 0x04000000, "CLONE_NEWIPC": 0x08000000,
    "CLONE_NEWPID": 0x20000000, "CLONE_NEWNET": 0x40000000,
}  # fmt: skip
_CLONE_NEWUSER = 0x10000000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 1, 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 4, 38
_CAPABILITIES_VERSION = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def separate(*, root: bool) -> None:
    """Leave the namespaces shared with others; those of processes begin with the next child.

    Without root this is only possible in a user namespace of its own, in which the process is nobody to the outside.
    """
    namespaces = sum(_NAMESPACES.values())
    _call("unshare", namespaces if root else namespaces | _CLONE_NEWUSER)
    if not root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {NOBODY} 1"),
            ("gid_map", f"{NOBODY} {NOBODY} 1"),
        ):
            Path("/proc/self", name).write_text(text)


def mount_own(scratch_bytes: int) -> None:
    """See only processes of its own, unchangeable; no terminals; and write only into an empty /tmp of so many bytes.

    What is mounted below /tmp, as a virtual environment may be, is there again.
    """
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    below = _outermost_below(SCRATCH)
    descriptors = {path: os.open(path, os.O_PATH) for path in below}
    _mount("tmpfs", SCRATCH, "tmpfs", _NO_SETUID | _NO_DEVICES, f"size={scratch_bytes},mode=1777")
    for path, descriptor in descriptors.items():
        _make_place(Path(path), is_folder=os.path.isdir(f"/proc/self/fd/{descriptor}"))
        _mount(f"/proc/self/fd/{descriptor}", path, "", _BIND | _RECURSIVE)
        os.close(descriptor)
    _mount("proc", "/proc", "proc", _READ_ONLY | _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)
    _mount("tmpfs", "/dev/pts", "tmpfs", _READ_ONLY | _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS, "size=4096")
    os.chdir(SCRATCH)  # until now this was the folder below the mount, which others share


def _outermost_below(folder: str) -> list[str]:
    points = [
        re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    ]
    chosen: list[str] = []
    for point in sorted({*points}, key=len):
        if point.startswith(f"{folder}/") and not any(point.startswith(f"{outer}/") for outer in chosen):
            chosen.append(point)
    return chosen


def _make_place(path: Path, *, is_folder: bool) -> None:
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir()
            parent.chmod(0o755)
    if is_folder:
        path.mkdir(exist_ok=True)
    else:
        path.touch()


def give_up_rights(uid: int | None) -> None:
    """Become `uid`, if one is given; hold no capability, gain none, and be closed to /proc and ptrace."""
    become(uid)
    _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)())
    _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)


def open_nothing_shared() -> None:
    """Open /dev/null anew for standard input and output: other workers would see the flags of a shared open file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def open_to_itself() -> None:
    """Be able to read its own /proc again, as any program can, and be measured from outside."""
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode() or None)
    _call("mount", *words, ctypes.c_ulong(flags), options.encode() or None)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")
