"""Output shared by all commands: one JSON object on stdout or a table for people, and the exit status."""

from __future__ import annotations

import errno
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from ringlab.errors import CostError, MissingExtraError, RinglabError

if TYPE_CHECKING:
    from rich.progress import Progress

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]

# Names of files, learners and models, and texts of errors may look like markup, so markup is off. Use `Text`
# and `style=` for styles.
people = Console(width=None if sys.stdout.isatty() else 120, markup=False, emoji=False)
stderr = Console(stderr=True, markup=False, emoji=False)
_SILENT = 10.0  # in a log, the seconds without a line after which a step without news also gets a line


def print_json(data: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print `data` as JSON on stdout.

    NaN and infinities become strings, because JSON has no numbers for them.
    """
    typer.echo(json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False))


def for_people(measured: dict[str, Any], output: Path | None, as_json: bool) -> bool:
    """Write a result as JSON to `output`, if given, and print it with --json.

    Return whether the caller must still print the result for people, which is so without --json.
    """
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(measured)
    return not as_json


def typed(context: typer.Context, name: str) -> bool:
    """Return whether a parameter was passed on the command line."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def ignored(context: typer.Context, names: Iterable[str]) -> str | None:
    """Return the first of these options that is on the command line, as the user wrote it, or None."""
    given = next((name for name in names if typed(context, name)), None)
    return None if given is None else f"--{given.replace('_', '-')}"


def finish(ok: bool) -> NoReturn:
    """End the command with status 0 if `ok`, otherwise 1."""
    raise typer.Exit(0 if ok else 1)


@contextmanager
def reporting_errors(as_json: bool, status: int = 1) -> Iterator[None]:
    """Print a RinglabError inside the block on stderr (and `{"ok": false, …}` on stdout), and exit with `status`."""
    try:
        yield
    except RinglabError as error:
        if as_json:
            fields = {"needed": error.needed, "got": error.got, "remedy": error.remedy}
            print_json({"ok": False, "error": {"kind": type(error).__name__, **fields}})
        one_line = isinstance(error, MissingExtraError)
        text = f"ringlab: {error}" if one_line else f"{type(error).__name__}\n{error}"
        stderr.print(text, style="red", highlight=False, soft_wrap=one_line)
        raise typer.Exit(status) from None


def check_writable(option: str, path: Path, *, make_folder: bool = False) -> None:
    """Check that a file can be written at `path` by opening one. The check leaves no change.

    make_folder: whether missing folders will be made later, and so are not an error.
    Raises: CostError if the file cannot be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        folder = path.absolute().parent
        while make_folder and not folder.exists():
            folder = folder.parent
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        needed = f"a file that can be written at {path}"
        raise CostError(needed, str(error.strerror), f"{option} with a file in a folder of yours") from None


def progress_bar() -> Progress:
    """Return a progress bar on stderr, which is silent if stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=stderr, disable=not stderr.is_terminal, transient=True)


@contextmanager
def counted(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after each of `total` steps, with the step's news as a text, or "" without news.

    On a terminal, stderr shows a bar. A log, such as that of a CI job, gets a line for a step that has news, and for
    a step that ends more than `_SILENT` seconds after the last line.
    """
    with progress_bar() as bar:
        task = bar.add_task(description, total=total)
        done, start = 0, time.monotonic()
        spoken = start

        def step(news: str) -> None:
            nonlocal done, spoken
            bar.advance(task)
            done, now = done + 1, time.monotonic()
            if stderr.is_terminal or not (news or now > spoken + _SILENT):
                return
            spoken = now
            text = f"{description} {done} of {total}, {now - start:.0f} s{news and f': {news}'}"
            stderr.print(text, highlight=False, soft_wrap=True)

        yield step


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
