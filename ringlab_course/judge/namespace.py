"""The system calls with which a process that was forked inside a sandbox isolates itself.

The fork server (fork_server.py) calls these functions in a child before the child serves any submission. If a
system call fails, the function raises OSError and the child ends. bubblewrap isolates the processes that it
starts in the same way.
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
    """Leave the namespaces shared with other processes; a new process namespace begins with the next child.

    Without root, this is possible only in a new user namespace, outside of which the process has no
    privileges.
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
    """Show the process only its own processes, no terminals, and an empty /tmp of `scratch_bytes`.

    It can write only there. Mounts below /tmp, such as a virtual environment, are restored.
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
    os.chdir(SCRATCH)  # the old working directory is the shared folder below the new mount


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
    """Switch to `uid`, if given; drop all capabilities for good, and close /proc and ptrace to others."""
    become(uid)
    _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)())
    _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)


def open_nothing_shared() -> None:
    """Open /dev/null again for standard input and output.

    Otherwise other workers could see changes to the flags of the shared open file.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def open_to_itself() -> None:
    """Allow this process to read its own /proc again, and to be measured from outside."""
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode() or None)
    _call("mount", *words, ctypes.c_ulong(flags), options.encode() or None)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")
