"""Serve the notebooks in JupyterLab, on this machine only: `python tools/lab.py [jupyter lab's arguments]`.

The server listens on 127.0.0.1, requires a token that Jupyter makes and prints, and does not fetch news or
updates.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
FIRST = "notebooks/00_start_here.ipynb"


def command(arguments: list[str]) -> list[str]:
    """Return the command line that starts JupyterLab on the first lesson."""
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={CHECKOUT}",
        f"--ServerApp.default_url=/lab/tree/{FIRST}",
        f"--LabApp.default_url=/lab/tree/{FIRST}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.news_url=None",
        "--LabApp.extension_manager=readonly",
        *(["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
        *arguments,
    ]


def main() -> None:
    """Replace this process by the JupyterLab server, so that Ctrl-C and signals reach the server."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    os.chdir(CHECKOUT)
    print(f"ringlab: serving {CHECKOUT}; open the URL below, end with Ctrl-C", flush=True)
    arguments = command(sys.argv[1:])
    os.execv(arguments[0], arguments)


if __name__ == "__main__":
    main()
