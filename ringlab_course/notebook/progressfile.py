"""The learner's own progress file: predictions, charts, checks, hints and grades, as one JSON document."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ringlab.errors import require_package

VERSION = 1
SECTIONS = ("predictions", "charts", "checks", "hints", "grades")
VARIABLE = "RINGLAB_PROGRESS"


def progress_path() -> Path:
    """Return the path of the progress file: $RINGLAB_PROGRESS, or else a file in the user's data directory.

    Raises: MissingExtraError without platformdirs, which finds that directory.
    """
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser()
    require_package("platformdirs", "lab", "the progress file")
    import platformdirs

    return Path(platformdirs.user_data_dir("ringlab", appauthor=False)) / "progress.json"


class ProgressFile:
    """Entries by section and key. Every write is atomic, and a damaged file is renamed, never lost."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or progress_path()

    def get(self, section: str, key: str) -> dict[str, Any]:
        """Return the entry, or an empty dict if there is none."""
        entry = self.section(section).get(key)
        return dict(entry) if isinstance(entry, dict) else {}

    def section(self, section: str) -> dict[str, Any]:
        """Return all entries of a section by key."""
        return self._read()[section]

    def update(self, section: str, key: str, **values: Any) -> None:
        """Set fields of one entry and write the file.

        If the file cannot be written, one line is printed and nothing is raised, so that the lesson can go
        on.
        """

        def merge(entries: dict[str, Any]) -> None:
            # the entry moves to the end of its section, so the latest entry is last
            entries[key] = {**entries.pop(key, {}), **values}

        self._change(section, merge)

    def forget(self, section: str, key: str) -> None:
        """Remove one entry, if it exists, and write the file."""
        self._change(section, lambda entries: entries.pop(key, None))

    def _change(self, section: str, change: Callable[[dict[str, Any]], Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                document = self._read()
                change(document[section])
                self._write(document)
        except OSError as error:
            print(f"(progress was not saved: {error.strerror}; set {VARIABLE} to a file you can write)")

    def _read(self) -> dict[str, Any]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return _fresh()
        except UnicodeDecodeError:
            return self._keep_aside()
        if not text.strip():
            return _fresh()
        try:
            document = json.loads(text)
        except ValueError:
            return self._keep_aside()
        if not _is_ours(document):
            return self._keep_aside()
        return {**_fresh(), **document}

    def _keep_aside(self) -> dict[str, Any]:
        """Rename a file that cannot be read to .bak (.bak-2, …), say so, and return an empty document."""
        aside, count = self.path.with_name(self.path.name + ".bak"), 1
        while aside.exists():
            count += 1
            aside = self.path.with_name(f"{self.path.name}.bak-{count}")
        try:
            os.replace(self.path, aside)
        except OSError:
            return _fresh()
        print(f"(the progress file could not be read; it was kept as {aside.name} and a new one begun)")
        return _fresh()

    def _write(self, document: dict[str, Any]) -> None:
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1, ensure_ascii=False)
                file.write("\n")
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file, so that only one notebook at a time reads, changes and writes it."""
        try:
            import fcntl
        except ImportError:  # without fcntl, as on Windows, the last writer wins
            yield
            return
        with open(self.path.with_name(self.path.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _fresh() -> dict[str, Any]:
    return {"version": VERSION, **{section: {} for section in SECTIONS}}


def _is_ours(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and document.get("version") == VERSION
        and all(isinstance(document.get(section, {}), dict) for section in SECTIONS)
    )
