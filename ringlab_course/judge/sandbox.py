"""The sandbox that student code lives in: bubblewrap command lines and the limits inside.

Inside there is no network and no other process. The only files are the interpreter, the system's libraries, both
packages (without the exercises) and an empty /tmp. If the judge runs as root, each worker gets an unprivileged uid.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ringlab.errors import SandboxError
from ringlab_course.checking.forbidden import PACKAGES
from ringlab_course.judge.processes import status_text
from ringlab_course.judge.removal import HIDDEN, HOME
from ringlab_course.mesh import DEVICES

NOTHING: Mapping[str, int] = {}

_UIDS = range(61184, 65520)  # unassigned on every distribution; also mapped in most containers
_SHARE = 64
"""The number of uids that one judge uses in turn; it is more than the number of workers at a time."""
_turn = itertools.count()
_MORE = {
    "triton": {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": "/tmp/triton"},
    # NPROC limits the threads in XLA's pools; the default is one per core. MALLOC_ARENA_MAX is set because one malloc
    # arena per thread would use up the address space.
    "jax": {
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES), "NPROC": str(DEVICES), "MALLOC_ARENA_MAX": "4",
    },
}  # fmt: skip
"""Additional environment variables for each kind of arrays."""
MESH_TASKS = 128
"""Threads of a worker with JAX: three for each simulated device, and some per core for compiling."""


@dataclass(frozen=True)
class Bounds:
    """Limits of one worker: bytes of address space and scratch, CPU seconds, threads, open files.

    total_memory_bytes, total_tasks: limits of all workers of a submission together.
    """

    memory_bytes: int = 4 << 30
    scratch_bytes: int = 64 << 20
    cpu_seconds: int = 120
    tasks: int = 32
    open_files: int = 32
    total_memory_bytes: int = 6 << 30
    total_tasks: int = 256

    def rlimits(self) -> dict[str, int]:
        """Return the limits by their names in the `resource` module."""
        limits = {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_FSIZE": self.scratch_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }
        if sys.platform == "linux":
            limits["RLIMIT_NPROC"] = self.tasks if os.getuid() == 0 else self.tasks + _own_tasks()
        return {name: value for name, value in limits.items() if hasattr(resource, name)}


def command(
    worker: list[str],
    bounds: Bounds,
    *,
    info_fd: int,
    seccomp_fd: int | None = None,
    hidden: tuple[str, ...] = HIDDEN,
    rewritten: Mapping[str, int] = NOTHING,
    arrays: str = "numpy",
) -> list[str]:
    """Return the command line that runs Python with the arguments `worker` in a sandbox.

    info_fd: bubblewrap writes {"child-pid": …}, the first process of the sandbox, to this descriptor.
    seccomp_fd: bubblewrap reads the filter of system calls from this descriptor.
    hidden: paths that are empty in the sandbox.
    rewritten: for each replaced file, the descriptor of its new content.
    Raises: SandboxError without bubblewrap.
    """
    uid = next_uid()
    scratch = bounds.scratch_bytes if find_bwrap()[1] >= (0, 7) else None
    return [
        *_outside(() if uid is None else ("CAP_SETUID", "CAP_SETGID")),
        *("--info-fd", str(info_fd)),
        *(() if seccomp_fd is None else ("--seccomp", str(seccomp_fd))),
        # /proc/1 is hidden: without root, bubblewrap's own process has the worker's uid, so that the worker
        # could read its files and memory.
        *("--proc", "/proc", "--perms", "0555", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"),
        *("--remount-ro", "/proc"),  # otherwise a worker could reset its own peak of memory
        *_files(hidden, rewritten, scratch),
        *(() if scratch else ("--remount-ro", "/tmp")),  # without a size limit, /tmp could fill the memory
        *_inside(arrays),
        *launch(worker, bounds, uid),
    ]


def server_command(
    server: list[str],
    *,
    hidden: tuple[str, ...] = HIDDEN,
    rewritten: Mapping[str, int] = NOTHING,
    arrays: str = "numpy",
) -> list[str]:
    """Return the command line that runs a fork server, Python with the arguments `server`, in a sandbox.

    The server sees no more than a worker does, but may give its children namespaces, mounts and, as root,
    uids.
    Raises: SandboxError without bubblewrap.
    """
    rights = ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN") if os.getuid() == 0 else ()
    files = ["--proc", "/proc", *_files(hidden, rewritten, None)]
    return [*_outside(rights), *files, *_inside(arrays), sys.executable, "-I", "-B", *server]


def _outside(rights: Iterable[str]) -> list[str]:
    bwrap, _ = find_bwrap()
    shared = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # Root gets no user namespace: outside, the workers in it would have root's uid, which has no task limit.
    user = [] if os.getuid() == 0 else ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    kept = [word for right in rights for word in ("--cap-add", right)]
    return [
        bwrap, *user, *shared, "--hostname", "judge", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *kept,
    ]  # fmt: skip


def _files(hidden: tuple[str, ...], rewritten: Mapping[str, int], scratch_bytes: int | None) -> list[str]:
    size = [] if scratch_bytes is None else ["--size", str(scratch_bytes)]
    return [
        *("--dev", "/dev", "--remount-ro", "/dev"),
        # /tmp comes before the binds, because a virtual environment may be below /tmp.
        *("--perms", "1777", *size, "--tmpfs", "/tmp"),
        *_binds(hidden, rewritten),
    ]


def _inside(arrays: str) -> list[str]:
    values = (part for item in environment(arrays).items() for part in ("--setenv", *item))
    return ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv", *values, "--"]


def launch(worker: list[str], bounds: Bounds, uid: int | None = None, *, unsafe: bool = False) -> list[str]:
    """Return the command line of the launcher that becomes Python with the arguments `worker`.

    unsafe: there is no sandbox whose end kills all processes inside, so the launcher stays as their parent.
    """
    program = [sys.executable, "-I", "-B", *worker]
    stay = unsafe and sys.platform == "linux"
    order = {"uid": uid, "limits": bounds.rlimits(), "program": program, "stay": stay}
    return [
        sys.executable,
        "-I",
        "-S",
        "-B",
        str(HOME / "ringlab_course/judge/launcher.py"),
        json.dumps(order),
    ]


@cache
def find_bwrap() -> tuple[str, tuple[int, ...]]:
    """Return bubblewrap's path and version. Raises: SandboxError if bubblewrap is missing or too old."""
    if sys.platform != "linux":
        raise SandboxError(
            "Linux: student code runs in a bubblewrap sandbox",
            sys.platform,
            "grade on Linux or in a Linux virtual machine; --unsafe only for code that you trust",
        )
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError(
            "bubblewrap, for the sandbox that student code runs in",
            "no `bwrap` on the PATH",
            "sudo apt-get install bubblewrap   (Fedora: sudo dnf install bubblewrap)",
        )
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
    if version < (0, 5):
        raise SandboxError(
            "bubblewrap 0.5 or newer", text.strip() or "no version", "install a newer bubblewrap"
        )
    return path, version


def environment(arrays: str = "numpy") -> dict[str, str]:
    """Return the whole environment of a worker; `arrays` is "numpy", "torch", "triton" or "jax".

    Triton runs in its interpreter, and JAX has simulated devices. Each library uses one thread, because many
    workers run at the same time. The malloc settings give every array of 64 KiB or more its own pages, so
    that the peak that the judge reads shows the memory in use, not freed memory of a heap.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {
        "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "learner",
        "LOGNAME": "learner", "MPLBACKEND": "Agg",
        "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", **threads,
        **_MORE.get(arrays, {}),
    }  # fmt: skip


def _binds(hidden: tuple[str, ...], rewritten: Mapping[str, int]) -> list[str]:
    arguments: list[str] = []
    made = {Path("/"), Path("/tmp")}
    for name in ("/lib", "/lib32", "/lib64", "/bin", "/sbin"):
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    visible = _visible()
    for path in visible:
        arguments += [*_parents(path, made), "--ro-bind", str(path), str(path)]
    for name in hidden:
        path = HOME / name
        if not any(path.is_relative_to(each) for each in visible):
            continue
        if path.is_dir():
            arguments += ["--perms", "0555", "--tmpfs", str(path), "--remount-ro", str(path)]
        elif path.is_file():
            arguments += ["--ro-bind", "/dev/null", str(path)]
    for name, descriptor in rewritten.items():
        arguments += ["--perms", "0444", "--ro-bind-data", str(descriptor), str(HOME / name)]
    return arguments


def _visible() -> list[Path]:
    """Return the paths that a worker may read, without paths inside of others."""
    prefixes = [Path(p) for p in (sys.base_prefix, sys.prefix, sys.base_exec_prefix, sys.exec_prefix)]
    interpreter = Path(sys.executable).resolve().parents[1]
    wanted = {
        Path("/usr"),
        interpreter,
        *(HOME / package for package in PACKAGES),
        *prefixes,
        *(p.resolve() for p in prefixes),
    }
    wanted |= {Path(p) for p in ("/etc/ld.so.cache", "/etc/alternatives") if Path(p).exists()}
    if wanted & {Path("/"), Path.home()}:
        raise SandboxError(
            "Python in a directory of its own",
            "Python installed directly in / or in the home directory",
            "use a venv",
        )
    chosen: list[Path] = []
    for path in sorted(wanted, key=lambda p: len(p.parts)):
        if not any(path.is_relative_to(outer) for outer in chosen):
            chosen.append(path)
    return chosen


def _parents(path: Path, made: set[Path]) -> list[str]:
    """Return arguments that create the folders above a bind, readable by all.

    A folder such as /root is not readable by all, but Python may be below it.
    """
    arguments: list[str] = []
    for parent in reversed(path.parents):
        if parent not in made:
            made.add(parent)
            arguments += ["--perms", "0755", "--dir", str(parent)]
    return arguments


def next_uid() -> int | None:
    """Return a uid that no other worker uses now, or None if the judge is not root.

    So limits and signals of one worker never affect another one.
    """
    if os.getuid() != 0:
        return None
    mine = _uids()[0]
    return mine[next(_turn) % len(mine)]


@cache
def _uids() -> tuple[range, socket.socket | None]:
    """Return the uids that only this process uses, and the socket whose name reserves them.

    The name is in the abstract namespace of Unix sockets. The kernel gives each name to one process and frees
    it when the process ends. If other judges hold all names, the uids are shared.
    """
    for first in range(0, len(_UIDS) - _SHARE + 1, _SHARE):
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0ringlab-judge-{_UIDS[first]}")
        except OSError:
            held.close()
            continue
        return _UIDS[first : first + _SHARE], held
    return _UIDS, None


def _own_tasks() -> int:
    """Return the number of tasks that this uid already runs.

    Older kernels count them in the sandbox's limit.
    """
    mine, total = os.getuid(), 0
    for status in Path("/proc").glob("[0-9]*/status"):
        text = status_text(status)
        if re.search(rf"^Uid:\t{mine}\t", text, re.MULTILINE):
            total += int(re.search(r"^Threads:\t(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
    return total
