"""Optional packages: what needs one asks for it here, so that its absence names the extra that installs it."""

from __future__ import annotations

import importlib.util

from ringlab.errors import MissingExtraError


def require_package(name: str, extra: str, user: str) -> None:
    """Return if the package `name` can be imported; `extra` is the extra of ringlab that installs it for `user`.

    Raises: MissingExtraError if it cannot.
    """
    if importlib.util.find_spec(name) is None:
        raise MissingExtraError(f"{name}, for {user}", "not installed", f"pip install 'ringlab[{extra}]'")
