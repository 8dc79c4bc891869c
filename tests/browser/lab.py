"""JupyterLab as `make lab LAB_ARGS=--no-browser` starts it, on a copy of the course that is thrown away."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PRINTED_URL = re.compile(r"http://127\.0\.0\.1:\d+/lab\S*[?&]token=\w+")
STARTUP = 120.0
"""Seconds; a loaded machine takes long to import JupyterLab."""


@dataclass(frozen=True)
class Lab:
    """A running server: its folder, the URL that it printed, and the progress file of its learner."""

    folder: Path
    url: str
    progress: Path
    log: Path


def copy_course(folder: Path) -> Path:
    """Copy into `folder` the files that a checkout needs to serve the notebooks, and return `folder`."""
    for part in ("notebooks", "exercises"):
        (folder / part).mkdir(parents=True)
        for notebook in sorted((CHECKOUT / part).glob("*.ipynb")):
            shutil.copy(notebook, folder / part)
    (folder / "tools").mkdir()
    shutil.copy(CHECKOUT / "tools" / "lab.py", folder / "tools")
    return folder


@contextmanager
def serve(scratch: Path, arguments: Sequence[str] = ()) -> Iterator[Lab]:
    """Serve a copy of the course below `scratch`, in a folder with a space in its name, and stop it at the end.

    The port and the token are the ones that Jupyter chooses and prints.
    """
    folder = copy_course(scratch / "ring course")
    log = scratch / "server.log"
    command = [sys.executable, str(folder / "tools" / "lab.py"), "--no-browser"]
    command += ["--LabApp.expose_app_in_browser=True", *arguments]  # shows window.jupyterapp to the tests
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, cwd=folder, env=_environment(scratch), stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        yield Lab(folder, _printed_url(process, log), scratch / "progress.json", log)
    finally:
        _stop(process)


def _environment(scratch: Path) -> dict[str, str]:
    """Return environment variables with which Jupyter neither reads nor writes this user's own settings."""
    own = {
        "RINGLAB_PROGRESS": scratch / "progress.json",
        "JUPYTERLAB_SETTINGS_DIR": scratch / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": scratch / "workspaces",
        "JUPYTER_RUNTIME_DIR": scratch / "runtime",
        "JUPYTER_CONFIG_DIR": scratch / "config",
        "JUPYTER_DATA_DIR": scratch / "data",
        "IPYTHONDIR": scratch / "ipython",
    }
    kept = {name: value for name, value in os.environ.items() if name != "RINGLAB_STATIC"}
    return kept | {name: str(path) for name, path in own.items()}


def _printed_url(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + STARTUP
    while time.monotonic() < end:
        if found := PRINTED_URL.search(log.read_text()):
            return found.group()
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab printed no URL in {STARTUP:.0f} s:\n{log.read_text()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server by SIGTERM; if it runs on for 30 s, end it and its kernels by SIGKILL."""
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
