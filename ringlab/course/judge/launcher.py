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
    """Read {uid, limits, program} as JSON from argv[1] and become `program`."""
    order = json.loads(sys.argv[1])
    if order["uid"] is not None:
        os.setgroups([])
        os.setresgid(order["uid"], order["uid"], order["uid"])
        os.setresuid(order["uid"], order["uid"], order["uid"])
        if os.getuid() == 0 or os.geteuid() == 0:
            raise SystemExit("still root")
    os.umask(0o077)
    for name, value in order["limits"].items():
        which = getattr(resource, name)
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    os.execv(order["program"][0], order["program"])


if __name__ == "__main__":
    main()
