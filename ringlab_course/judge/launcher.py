"""The first program in the sandbox: gives up privileges, sets limits, then becomes the worker.

Run by path, with `python -I -S`, so that nothing is imported before the privileges are gone.
The exec afterwards matters: a process that changed its uid may not read its own /proc.
"""

from __future__ import annotations

import json
import os
import resource
import sys


def main() -> None:
    """Read {uid, limits, program, stay} as JSON from argv[1] and become `program`, or stay as its parent."""
    order = json.loads(sys.argv[1])
    become(order["uid"])
    set_limits(order["limits"])
    if order["stay"]:
        _stay_with(order["program"])
    os.execv(order["program"][0], order["program"])


def become(uid: int | None) -> None:
    """Become `uid`, if one is given, and keep what is written to itself. Raises: SystemExit if that leaves it root."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        if os.getuid() == 0 or os.geteuid() == 0:
            raise SystemExit("still root")
    os.umask(0o077)


def set_limits(limits: dict[str, int]) -> None:
    """Set limits by the names that the `resource` module has for them; none is raised."""
    for name, value in limits.items():
        which = getattr(resource, name)
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _stay_with(program: list[str]) -> None:
    """Return in a child that is to become `program`; its parent never returns.

    Whatever loses its parent falls to this process, so that none gets out of the judge's sight.
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
    os.closerange(0, 1024)  # the end of the worker is to be the end of its socket
    try:
        while True:
            os.wait()
    except ChildProcessError:
        os._exit(0)


if __name__ == "__main__":
    main()
