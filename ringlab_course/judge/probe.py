"""Test whether the sandbox works on this machine, and say what to do if it does not."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ringlab.errors import SandboxError
from ringlab_course.judge.process import WorkerProcess
from ringlab_course.judge.sandbox import find_bwrap

APPARMOR_PROFILE = """\
abi <abi/4.0>,
include <tunables/global>
profile bwrap /usr/bin/bwrap flags=(unconfined) {
  userns,
}
"""


@dataclass(frozen=True)
class Probe:
    """Whether the sandbox is available, with the version of bubblewrap or else the reason and a remedy.

    unforked: why no server can fork the workers. Then each worker has to import what submissions need, which
    takes a second or more.
    """

    available: bool
    version: str = ""
    unforked: str = ""
    needed: str = ""
    got: str = ""
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as data for JSON."""
        return asdict(self)


@cache
def probe() -> Probe:
    """Return whether the sandbox works here, tested by starting a real worker (about 0.3 s)."""
    try:
        version = ".".join(map(str, find_bwrap()[1]))
    except SandboxError as error:
        return Probe(False, needed=error.needed, got=error.got, remedy=error.remedy)
    try:
        with WorkerProcess() as worker:
            worker.ready(30)
            return Probe(True, version, worker.unforked)
    except SandboxError as error:
        return Probe(False, version, needed=error.needed, got=error.got, remedy=_remedy())


def require() -> None:
    """Check that the sandbox works. Raises: SandboxError otherwise, because nothing is graded without it."""
    found = probe()
    if not found.available:
        raise SandboxError(found.needed, found.got, found.remedy)


def _remedy() -> str:
    if _setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor forbids user namespaces (Ubuntu 24.04). Allow them to bubblewrap alone:\n"
            f"sudo tee /etc/apparmor.d/bwrap <<'EOF'\n{APPARMOR_PROFILE}EOF\n"
            "sudo apparmor_parser -r /etc/apparmor.d/bwrap"
        )
    if _setting("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    if _setting("/proc/sys/user/max_user_namespaces") == "0":
        return "sudo sysctl -w user.max_user_namespaces=10000"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "inside a container, start it with `--cap-add SYS_ADMIN --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined`, or grade on the host"
        )
    return (
        f"let every user read and enter {sys.prefix} and {sys.base_prefix}, and try "
        "`bwrap --unshare-all --ro-bind /usr /usr --symlink usr/lib64 /lib64 true`"
    )


def _setting(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
