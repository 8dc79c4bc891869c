"""Temporary folders that are removed even if the process that made them is killed."""

from __future__ import annotations

import subprocess
import tempfile

_REMOVE = 'cat > /dev/null; while [ -e "$1" ] && ! rm -rf -- "$1" 2> /dev/null; do sleep 0.1; done'
"""Wait until the maker, which writes nothing, closes the pipe or ends. Then remove the folder."""


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A `tempfile.TemporaryDirectory` that a second process, a shell, removes if this process is killed.

    >>> with TemporaryFolder(prefix="ringlab-example-") as name:
    ...     print(name.startswith(tempfile.gettempdir()))
    True
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix=prefix)
        self._keeper = subprocess.Popen(
            ["sh", "-c", _REMOVE, "sh", self.name], stdin=subprocess.PIPE, start_new_session=True
        )

    def cleanup(self) -> None:
        """Remove the folder."""
        super().cleanup()
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        self._keeper.wait()
