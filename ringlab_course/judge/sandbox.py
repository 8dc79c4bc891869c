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
"""Uids that one judge's process takes turns with: more than it has workers at a time."""
_turn = itertools.count()
_MORE = {
    "triton": {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": "/tmp/triton"},
    # NPROC limits the threads in XLA's pools; the default is one per core. MALLOC_ARENA_MAX is set because one malloc
    # arena per thread would use up the address space.
    "jax": {
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES), "NPROC": str(DEVICES), "MALLOC_ARENA_MAX": "4",
    },
}  # fmt: skip
"""What the environment holds besides, by the arrays of a worker."""
MESH_TASKS = 128
"""Threads of a worker with JAX: three for each simulated device, and some to compile with for each core."""


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
        """Return the limits by the names that the `resource` module has for them."""
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
    """Return the command line that runs the Python arguments `worker` in a sandbox.

    bubblewrap writes {"child-pid": …}, the first process of the sandbox, to `info_fd`, and reads
    the filter of system calls from `seccomp_fd`. hidden: paths that are empty there. rewritten: by file, the descriptor
    from which bubblewrap reads what is there instead. Raises: SandboxError without bubblewrap.
    """
    uid = next_uid()
    scratch = bounds.scratch_bytes if find_bwrap()[1] >= (0, 7) else None
    return [
        *_outside(() if uid is None else ("CAP_SETUID", "CAP_SETGID")),
        *("--info-fd", str(info_fd)),
        *(() if seccomp_fd is None else ("--seccomp", str(seccomp_fd))),
        # Without root, bubblewrap's own process has the worker's uid, so that its files and memory could be read.
        *("--proc", "/proc", "--perms", "0555", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"),
        *("--remount-ro", "/proc"),  # or a worker could begin its own peak of memory anew
        *_files(hidden, rewritten, scratch),
        *(() if scratch else ("--remount-ro", "/tmp")),  # without a size it could fill the memory
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
    """Return the command line that runs a fork server, the Python arguments `server`, in a sandbox.

    It sees no more than a worker, but may give its children namespaces, mounts and, as root, uids.
    Raises: SandboxError without bubblewrap.
    """
    rights = ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN") if os.getuid() == 0 else ()
    files = ["--proc", "/proc", *_files(hidden, rewritten, None)]
    return [*_outside(rights), *files, *_inside(arrays), sys.executable, "-I", "-B", *server]


def _outside(rights: Iterable[str]) -> list[str]:
    bwrap, _ = find_bwrap()
    shared = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # Root needs no user namespace: there it would keep root's own uid outside, which has no task limit.
    user = [] if os.getuid() == 0 else ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    kept = [word for right in rights for word in ("--cap-add", right)]
    return [
        bwrap, *user, *shared, "--hostname", "judge", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *kept,
    ]  # fmt: skip


def _files(hidden: tuple[str, ...], rewritten: Mapping[str, int], scratch_bytes: int | None) -> list[str]:
    size = [] if scratch_bytes is None else ["--size", str(scratch_bytes)]
    return [
        *("--dev", "/dev", "--remount-ro", "/dev"),
        *("--perms", "1777", *size, "--tmpfs", "/tmp"),  # before the binds: a venv may lie below /tmp
        *_binds(hidden, rewritten),
    ]


def _inside(arrays: str) -> list[str]:
    values = (part for item in environment(arrays).items() for part in ("--setenv", *item))
    return ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv", *values, "--"]


def launch(worker: list[str], bounds: Bounds, uid: int | None = None, *, unsafe: bool = False) -> list[str]:
    """Return the command line of the launcher that becomes Python with the arguments `worker`.

    unsafe: there is no sandbox whose end is that of all inside it; the launcher stays as the parent of all.
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
    """Return bubblewrap's path and version. Raises: SandboxError where there is none."""
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
    """Return the whole environment of a worker whose arrays are NumPy's, torch's, "triton"'s or "jax"'s.

    Triton has its interpreter on, JAX its simulated devices. One thread each, as many workers run side by side. The malloc settings give every array of
    64 KiB or more its own pages, so that the peak the judge reads is what is held, not a heap's past.
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
    """The paths a worker may read, outermost first, each once."""
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
            "Python in a directory of its own", "a Python right in / or the home directory", "use a venv"
        )
    chosen: list[Path] = []
    for path in sorted(wanted, key=lambda p: len(p.parts)):
        if not any(path.is_relative_to(outer) for outer in chosen):
            chosen.append(path)
    return chosen


def _parents(path: Path, made: set[Path]) -> list[str]:
    """Directories above a bind, readable by all: /root, say, is not, and Python may lie below it."""
    arguments: list[str] = []
    for parent in reversed(path.parents):
        if parent not in made:
            made.add(parent)
            arguments += ["--perms", "0755", "--dir", str(parent)]
    return arguments


def next_uid() -> int | None:
    """Return a uid that no other worker has now, so that limits and signals of one never reach another; None unless root."""
    if os.getuid() != 0:
        return None
    mine = _uids()[0]
    return mine[next(_turn) % len(mine)]


@cache
def _uids() -> tuple[range, socket.socket | None]:
    """The uids that are this process's alone, and the name that it holds for as long as it lives to show it.

    Names of the abstract kind: the kernel gives each to one holder, and takes it back at its end.
    Where many judges hold all of them, the uids are everybody's.
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
    """Tasks that this uid runs already: older kernels count them against the limit inside, too."""
    mine, total = os.getuid(), 0
    for status in Path("/proc").glob("[0-9]*/status"):
        text = status_text(status)
        if re.search(rf"^Uid:\t{mine}\t", text, re.MULTILINE):
            total += int(re.search(r"^Threads:\t(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
    return total
