"""The first program in the sandbox: gives up privileges, sets limits, then becomes the worker.

This file is run by its path with `python -I -S`, so that nothing is imported before the privileges are gone.
Then it replaces itself by the worker with exec, because a process that changed its uid may not read its own
files in /proc.
"""

from __future__ import annotations

import json
import os
import resource
import sys


def main() -> None:
    """Read {uid, limits, program, stay} as JSON from argv[1].

    Then become `program`. With `stay`, a child process becomes `program` instead, and this process waits for it.
    """
    order = json.loads(sys.argv[1])
    become(order["uid"])
    set_limits(order["limits"])
    if order["stay"]:
        _stay_with(order["program"])
    os.execv(order["program"][0], order["program"])


def become(uid: int | None) -> None:
    """Switch to `uid`, if given, and make new files private.

    Raises: SystemExit if the process is still root.
    """
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        if os.getuid() == 0 or os.geteuid() == 0:
            raise SystemExit("still root")
    os.umask(0o077)


def set_limits(limits: dict[str, int]) -> None:
    """Set limits, given by their names in the `resource` module. No limit is ever raised."""
    for name, value in limits.items():
        which = getattr(resource, name)
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _stay_with(program: list[str]) -> None:
    """Fork, and return only in the child, which is to become `program`; the parent waits and never returns.

    Processes that lose their parent become children of this process, so that none escapes the judge.
    """
    import ctypes
    import signal

    set_parent_death_signal, set_child_subreaper = 1, 36
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(set_parent_death_signal, int(signal.SIGKILL))
    prctl(set_child_subreaper, 1, 0, 0, 0)
    if os.fork() == 0:
        prctl(set_parent_death_signal, int(signal.SIGKILL))
        os.setsid()
        return
    os.closerange(0, 1024)  # so that the socket closes when the worker ends
    try:
        while True:
            os.wait()
    except ChildProcessError:
        os._exit(0)


if __name__ == "__main__":
    main()
