"""A peer whose package nobody has: `ringlab check tests.conformance.absent_peer:target` says what to install."""

from __future__ import annotations

from typing import Any

from ringlab.conformance.peers.peer import Peer


def make() -> Any:
    raise AssertionError("a package that is not there is not imported")


def __getattr__(name: str) -> Any:
    if name != "target":
        raise AttributeError(name)
    return Peer("absent", "ringlab-no-such-package", "1.0", make).target()
