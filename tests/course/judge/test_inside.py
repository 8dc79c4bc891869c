"""Code in a worker tries, one after another, the ways to reach other parts of the machine. None succeeds."""

from __future__ import annotations

import errno
import platform
import secrets

import pytest

from ringlab_course.judge import seccomp, spawn
from ringlab_course.judge.judge import grade
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.judge.conftest import asked
from tests.course.judge.small_contract import EXERCISE, notebook

pytestmark = pytest.mark.needs_bwrap
filtered = pytest.mark.skipif(seccomp.filter_program() is None, reason="no filter for this processor")

LOOK = """
import ctypes, os, socket
LIBC = ctypes.CDLL(None, use_errno=True)
def system_calls(numbers):
    found = []
    for number in numbers:
        ctypes.set_errno(0)
        answer = LIBC.syscall(number, 0, 0, 0, 0, 0, 0)
        found.append((number, answer, ctypes.get_errno()))
    return found
def futexes(number):
    import mmap
    with open("/usr/lib/os-release", "rb") as file:
        shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    place = ctypes.c_void_p(_address(shared))
    found = []
    for command in (1, 3, 4, 5, 10, 1 | 128, 10 | 128, 0, 9, 9 | 256):  # WAKE … WAKE_BITSET, private ones, WAITs
        ctypes.set_errno(0)
        LIBC.syscall(number, place, command, 1, None, place, -1)
        found.append(ctypes.get_errno())
    return found
def _address(shared):
    import numpy as np
    return np.frombuffer(shared, np.uint8).ctypes.data
def long_pipe():
    import fcntl
    ends = os.pipe()
    try: return fcntl.fcntl(ends[1], 1031, 1 << 20)
    except OSError as error: return error.errno
    finally: [os.close(end) for end in ends]
def type_into_terminal():
    found = []
    for request in (0x5412, 0x541C, 0x5413):  # TIOCSTI, TIOCLINUX, and the size of the window
        try:
            leader, follower = os.openpty()
        except FileNotFoundError:
            return "there are none"
        ctypes.set_errno(0)
        LIBC.ioctl(follower, request, ctypes.create_string_buffer(64))
        found.append(ctypes.get_errno())
        os.close(leader)
        os.close(follower)
    try:
        os.open("/dev/tty", os.O_RDWR)
        found.append("a terminal")
    except OSError:
        pass
    return found
def sockets():
    made = []
    for family in range(46):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
            try:
                socket.socket(family, kind).close()
                made.append(family)
            except OSError:
                pass
    return sorted(set(made))
def descriptors():
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            found.append((number, os.readlink(f"/proc/self/fd/{number}")))
        except OSError:
            pass
    return found
def first_process():
    return os.listdir("/proc/1")
def of_others():
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) != os.getpid():
            for part in ("environ", "mem", "maps", "fd/0", "fd/2", "fd/3", "root/etc/passwd", "cwd", "auxv"):
                path = f"/proc/{pid}/{part}"
                try:
                    with open(path, "rb") as file:
                        found += [path] * bool(file.read(1))
                except OSError:
                    pass
    return found
def shared_memory():
    made = []
    for path in ("/dev/shm/x", "/dev/mqueue/x", "/run/x", "/run/lock/x", "/var/tmp/x"):
        try:
            open(path, "w").close()
            made.append(path)
        except OSError:
            pass
    return made
"""
NAMES = [
    "futexes",
    "long_pipe",
    "system_calls",
    "type_into_terminal",
    "sockets",
    "descriptors",
    "first_process",
    "of_others",
    "shared_memory",
]


@pytest.fixture(scope="module")
def look(forked):
    with asked(LOOK, NAMES, forked) as ask:
        yield ask


def refused(numbers: dict[str, int], answers: list) -> set[str]:
    """Return the names of the system calls that were refused and had no effect."""
    names = {number: name for name, number in numbers.items()}
    return {names[number] for number, answer, error in answers if (answer, error) == (-1, errno.EPERM)}


@filtered
def test_every_call_of_the_list_is_refused(look) -> None:
    denied = seccomp._DENIED[platform.machine()]
    assert refused(denied, look("system_calls", list(denied.values()))) == set(denied)
    named = {
        "ptrace",
        "process_vm_readv",
        "keyctl",
        "add_key",
        "unshare",
        "setns",
        "mount",
        "bpf",
        "io_uring_setup",
        "futex_waitv",
        "futex_wake",
        "futex_wait",
        "futex_requeue",
    }
    assert named <= set(denied), "the filter denies every call that the manual names"


@filtered
def test_without_the_filter_some_would_get_through(monkeypatch) -> None:
    monkeypatch.setattr(spawn, "filter_program", lambda **_: None)
    harmless = ("keyctl", "io_uring_setup", "memfd_create", "ptrace")
    denied = {name: seccomp._DENIED[platform.machine()][name] for name in harmless}
    with Session([LOOK], NAMES, torch=False) as session:
        answers = SandboxedSubject(session, "system_calls").call(list(denied.values()))
        assert refused(denied, answers) < set(denied)
        assert len(SandboxedSubject(session, "sockets").call()) > 1


@filtered
def test_nobody_is_woken_at_a_file_that_others_map_too(look) -> None:
    """Wakes on shared files are refused, because the number of waiters would be a message; waiting is allowed."""
    errors = look("futexes", seccomp._FUTEX[platform.machine()])
    assert errors[:5] == [errno.EPERM] * 5 and errno.EPERM not in errors[5:]


@filtered
def test_pipes_hold_next_to_nothing(look) -> None:
    assert look("long_pipe") == errno.EPERM


@filtered
def test_nothing_is_typed_into_a_terminal(look, forked) -> None:
    assert look("type_into_terminal") == ("there are none" if forked else [errno.EPERM, errno.EPERM, 0])


@filtered
def test_sockets_are_those_of_unix(look) -> None:
    assert look("sockets") == [1], (
        "only Unix sockets can be made, as others, such as vsock, ignore namespaces"
    )


def test_descriptors_lead_to_the_judges_socket_and_nowhere_else(look) -> None:
    found = dict(look("descriptors"))
    others = [target for number, target in found.items() if target != "/dev/null"]
    assert {found[number] for number in (0, 1, 2)} == {"/dev/null"}
    assert [target.partition(":")[0] for target in others] == ["socket"]


def test_the_other_processes_inside_show_nothing(look, forked) -> None:
    assert look("of_others") == []
    if not forked:  # without root, bubblewrap's process has the worker's uid
        assert look("first_process") == []


def test_no_memory_is_shared_with_others(look) -> None:
    assert look("shared_memory") == []


TELLS = """
import glob, os, sys
def double(x):
    found = [str(sys.argv), str(dict(os.environ)), str(sys.orig_argv)]
    for path in glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/environ") + ["/proc/self/mountinfo", "/proc/keys"]:
        try:
            found.append(open(path, "rb").read().replace(b"\\0", b" ").decode("latin-1"))
        except OSError:
            pass
    raise ValueError(" ".join(found))
"""


def test_neither_seed_nor_path_reach_a_worker(tmp_path) -> None:
    seed = secrets.randbits(56) | 1 << 60
    told = grade(notebook(tmp_path, TELLS), EXERCISE, seed=seed).stages[0].checks[0].counterexample
    assert "MPLBACKEND" in told and "fork_server" in told, "the worker read its environment and arguments"
    assert str(seed) not in told and str(tmp_path) not in told
