"""Run commands of ringlab one after the other in one process, and print their results as one JSON object.

    python run_in_lean.py COMMANDS.json

COMMANDS.json: {"refused": [module, …], "watched": [module, …], "setup": code, "commands": [[word, …], …]}. A
refused module cannot be imported. The result of a command has its status, stdout, stderr, and the watched
modules that it tried to import.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import io
import json
import sys
import traceback
from pathlib import Path
from typing import Any


class Guard(importlib.abc.MetaPathFinder):
    """An import finder that finds no module, refuses some, and records requests for watched modules."""

    def __init__(self, watched: list[str], refused: list[str]) -> None:
        self.watched, self.refused, self.asked = set(watched), set(refused), list[str]()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Return nothing. Raises: ModuleNotFoundError for a refused module."""
        package = fullname.partition(".")[0]
        if package in self.watched:
            self.asked.append(fullname)
        if package in self.refused:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def status_of(words: list[str]) -> int:
    """Return the exit status of `ringlab WORDS`, as a shell would see it."""
    from ringlab.cli import main

    sys.argv = ["ringlab", *words]
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except Exception:
        traceback.print_exc()
        return 70
    return 0


def run() -> None:
    """Run the commands of the file that the command line names."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    guard = Guard(asked["watched"], asked["refused"])
    sys.meta_path.insert(0, guard)
    exec(asked.get("setup", ""), {})
    results = []
    for words in asked["commands"]:
        guard.asked.clear()
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = status_of(words)
        ended = {"status": status, "stdout": out.getvalue(), "stderr": err.getvalue()}
        results.append({"command": " ".join(words), **ended, "asked": list(guard.asked)})
    print(json.dumps(results))


if __name__ == "__main__":  # children of `check` and `bench` import this file again
    run()
