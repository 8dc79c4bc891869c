"""The system calls a worker may not make: new processes, and what reaches past namespaces.

Threads are allowed, processes are not: so there are no fork bombs and no orphans, and a memory
limit for one process is a limit for the worker. The filter is a classic BPF program.
Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import errno
import os
import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000  # numbers of the x32 ABI, which would go by other names

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_DENIED = {
    "x86_64": {
        "fork": 57, "vfork": 58, "ptrace": 101, "pivot_root": 155, "mount": 165, "umount2": 166, "kexec_load": 246,
        "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
        "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321,
        "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "unshare": 97, "kexec_load": 104, "ptrace": 117, "add_key": 217,
        "request_key": 218, "keyctl": 219, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427,
    },
}  # fmt: skip
_CLONE3 = 435  # its flags lie behind a pointer, out of reach; the C library then takes clone


def filter_program(machine: str = "") -> bytes | None:
    """Return the filter for `machine`, by default this one; None where its system calls are not listed here."""
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
    steps += [_step(_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    steps += [_step(_EQUAL, _CLONE[machine], 0, 3), _step(_LOAD, _FIRST_ARGUMENT)]
    steps += [_step(_ANY_BIT, _CLONE_THREAD, 1, 0), refuse, _step(_RETURN, _ALLOW)]
    return b"".join(steps)


def filter_file() -> int | None:
    """Return a descriptor of a file that holds this machine's filter, to be closed by the caller; None without."""
    program = filter_program()
    if program is None:
        return None
    descriptor = os.memfd_create("seccomp")
    os.write(descriptor, program)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
