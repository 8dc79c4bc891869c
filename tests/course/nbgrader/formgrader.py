"""nbgrader's formgrader, served on this machine only with a token, on a course folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

URL = re.compile(r"(http://127\.0\.0\.1:\d+)/\S*[?&]token=(\w+)")
STARTUP_S = 120.0


@contextmanager
def serve(course: Path, scratch: Path) -> Iterator[tuple[str, str]]:
    """Serve the course folder and yield the server's address and its token; stop it at the end."""
    log = scratch / "formgrader.log"
    command = [sys.executable, "-m", "jupyter", "server", "--no-browser", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.root_dir={course}", "--ServerApp.allow_root=True"]
    own = {f"JUPYTER_{name}_DIR": str(scratch / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")} | {
        "IPYTHONDIR": str(scratch / "ipython")
    }
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, cwd=course, env={**os.environ, **own}, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        yield _printed(process, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _printed(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    end = time.monotonic() + STARTUP_S
    while time.monotonic() < end and process.poll() is None:
        if found := URL.search(log.read_text()):
            return found[1], found[2]
        time.sleep(0.1)
    raise RuntimeError(f"no server in {STARTUP_S:.0f} s:\n{log.read_text()}")
