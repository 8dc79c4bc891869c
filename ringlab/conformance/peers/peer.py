"""A published package of ring attention as a target: its origin, and the kernel that computes its blocks."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, replace

from ringlab.conformance.target.claims import Target
from ringlab.errors import BackendError

OWN_KERNEL = "its own"
STAND_IN = "a stand-in for flash-attn's, in float32 on the CPU"


@dataclass(frozen=True)
class Peer:
    """One function of a published package.

    package, pinned: its name on PyPI, and the version that the extra [peers] installs ("" if ringlab needs
    the package anyway). make: imports it and returns the target. kernel: the code that computes a block.
    without: returns the reason why the package cannot run on this machine, or None if it can.
    """

    name: str
    package: str
    pinned: str
    make: Callable[[], Target]
    kernel: str = OWN_KERNEL
    without: Callable[[], BackendError | None] = lambda: None

    @property
    def version(self) -> str:
        """Return the installed version. Raises: BackendError if the package is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            wanted = f"{self.package}=={self.pinned}"
            raise BackendError(
                f"the package {self.package}, for peer:{self.name}",
                "it is not installed",
                f"pip install '{wanted}', or all peers: pip install -c requirements.lock -e '.[peers]'",
            ) from None

    @property
    def about(self) -> str:
        """Return the package, its version and its kernel in words. Raises: the errors of `version`."""
        return f"{self.package} {self.version} ({self.name}; kernel: {self.kernel})"

    def target(self) -> Target:
        """Return the target, named after package and version. Raises: BackendError if it is unavailable."""
        about, obstacle = self.about, self.without()
        if obstacle is not None:
            raise obstacle
        return replace(self.make(), name=about).completed()
