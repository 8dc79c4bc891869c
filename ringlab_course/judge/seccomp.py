"""The system calls that a worker may not make: new processes, and everything that bypasses namespaces.

Threads are allowed but processes are not. So there are no fork bombs and no orphans, and a memory limit for
one process limits the worker. Only Unix sockets are allowed, because some families (vsock) ignore namespaces.
Workers read the same system files, so every call that shows who else uses a file is forbidden (locks, leases,
watches, cached pages, waking a waiting thread), because ranks could use such a call to communicate past the
judge. Memory that belongs to no process (memfd, System V, long pipes) is also forbidden, because no
measured peak would include it.
The filter is a classic BPF program. Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000  # the first number of the x32 ABI, which has other numbers for the same calls

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SINCE_5 = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "memfd_secret": 447, "futex_waitv": 449, "cachestat": 451, "futex_wake": 454, "futex_wait": 455,
    "futex_requeue": 456,
}  # fmt: skip
"""Newer calls, which have the same number on every machine."""
_DENIED = {
    "x86_64": {
        "shmget": 29, "fork": 57, "vfork": 58, "semget": 64, "msgget": 68, "flock": 73, "ptrace": 101, "syslog": 103,
        "pivot_root": 155, "mount": 165, "umount2": 166, "mq_open": 240, "kexec_load": 246, "add_key": 248,
        "request_key": 249, "keyctl": 250, "inotify_init": 253, "inotify_add_watch": 254, "unshare": 272,
        "inotify_init1": 294, "perf_event_open": 298, "fanotify_init": 300, "open_by_handle_at": 304, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "memfd_create": 319, "bpf": 321,
        "userfaultfd": 323, "preadv2": 327, "pwritev2": 328, **_SINCE_5,
    },
    "aarch64": {
        "inotify_init1": 26, "inotify_add_watch": 27, "flock": 32, "umount2": 39, "mount": 40, "pivot_root": 41,
        "unshare": 97, "kexec_load": 104, "syslog": 116, "ptrace": 117, "mq_open": 180, "msgget": 186, "semget": 190,
        "shmget": 194, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "fanotify_init": 262,
        "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "preadv2": 286, "pwritev2": 287, **_SINCE_5,
    },
}  # fmt: skip
_SOCKET = {"x86_64": 41, "aarch64": 198}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_EXEC = {"x86_64": (59, 322), "aarch64": (221, 281)}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_AF_UNIX = 1
_SHARED_BY_FILE = {
    "F_GETLK": 5, "F_SETLK": 6, "F_SETLKW": 7, "F_OFD_GETLK": 36, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38,
    "F_SETLEASE": 1024, "F_GETLEASE": 1025, "F_NOTIFY": 1026,
}  # fmt: skip
_LONG_PIPES = {"F_SETPIPE_SZ": 1031}
_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_PRIVATE = 0x80
_WAITING = {"FUTEX_WAIT": 0, "FUTEX_WAIT_BITSET": 9}
"""The futex operations allowed on a shared futex: waiting, for example for a thread's end."""
_FUTEX_REALTIME = 0x100
_IOCTL = {"x86_64": 16, "aarch64": 29}
_INTO_TERMINALS = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}  # these requests type into a terminal
_CLONE3 = 435  # its flags are behind a pointer, so they cannot be checked; the C library falls back to clone


def filter_program(machine: str = "", *, alone: bool = False) -> bytes | None:
    """Return the filter for `machine`, by default this one, or None if its system calls are not listed here.

    alone: whether the submission has only one worker. Then it may wake threads that wait at any futex, as JAX
    does.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    refuse = _step(_RETURN, _ERRNO | errno.EPERM)
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        steps += [_step(_AT_LEAST, _X32, 0, 1), refuse]
    for number in _DENIED[machine].values():
        steps += [_step(_EQUAL, number, 0, 1), refuse]
    steps += _for_call(_SOCKET[machine], 0, [_step(_EQUAL, _AF_UNIX, 1, 0), refuse])
    for call, commands in ((_FCNTL, {**_SHARED_BY_FILE, **_LONG_PIPES}), (_IOCTL, _INTO_TERMINALS)):
        pairs = [(_step(_EQUAL, command, 0, 1), refuse) for command in commands.values()]
        steps += _for_call(call[machine], 1, [step for pair in pairs for step in pair])
    allow = _step(_RETURN, _ALLOW)
    shared = [_step(_ANY_BIT, _FUTEX_PRIVATE, 0, 1), allow]
    for command in _WAITING.values():
        for flags in (0, _FUTEX_REALTIME):
            shared += [_step(_EQUAL, command | flags, 0, 1), allow]
    if not alone:
        steps += _for_call(_FUTEX[machine], 1, [*shared, refuse])
    steps += [_step(_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    steps += [_step(_EQUAL, _CLONE[machine], 0, 3), _step(_LOAD, _FIRST_ARGUMENT)]
    steps += [_step(_ANY_BIT, _CLONE_THREAD, 1, 0), refuse, _step(_RETURN, _ALLOW)]
    return b"".join(steps)


def forbid_programs() -> None:
    """Make the kernel refuse, from now on and in all threads, to replace this process by another program.

    A new program would start with a new peak of memory. This does nothing on machines whose system calls are
    not listed.
    """
    machine = platform.machine()
    if machine not in _EXEC:
        return
    refuse = _step(_RETURN, _ERRNO | errno.EPERM)
    steps = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, _ARCHITECTURES[machine], 1, 0), _step(_RETURN, _KILL)]
    steps += [_step(_LOAD, _NUMBER)]
    for number in _EXEC[machine]:
        steps += [_step(_EQUAL, number, 0, 1), refuse]
    install(b"".join([*steps, _step(_RETURN, _ALLOW)]))


def install(program: bytes) -> None:
    """Make the kernel filter all system calls of this process, in all threads, permanently.

    The process must not be able to gain privileges. Raises: OSError if the kernel refuses.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    set_mode_filter, all_threads = 1, 1
    number = _SECCOMP[platform.machine()]
    if ctypes.CDLL(None, use_errno=True).syscall(number, set_mode_filter, all_threads, head) != 0:
        raise OSError(ctypes.get_errno(), "no filter of system calls could be set")


def _for_call(number: int, argument: int, steps: list[bytes]) -> list[bytes]:
    """Return steps for one system call, which examine its `argument`-th argument.

    Calls that they do not refuse are allowed.
    """
    inside = [_step(_LOAD, _FIRST_ARGUMENT + 8 * argument), *steps, _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, number, 0, len(inside)), *inside]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
