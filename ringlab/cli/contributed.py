"""Commands that are imported when they are first needed, among them those that other packages add by entry points."""

from __future__ import annotations

import sys
from collections import UserDict
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group


class LazyCommands(UserDict[str, Any]):
    """Commands by name; one given as a `partial` is made by calling it when it is first needed."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, partial):
            found = self.data[name] = found()
        return found


class ExtensibleGroup(TyperGroup):
    """A group of commands of its own and of other packages, each imported when it is first needed.

    An entry point, whether in `own` or of the group `entry_group`, is a command's function or the app of its subcommands.
    """

    entry_group: ClassVar[str]
    own: ClassVar[dict[str, str]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        own = [EntryPoint(name, where, self.entry_group) for name, where in self.own.items()]
        lazy = {
            entry.name: partial(_command_of, entry) for entry in (*own, *entry_points(group=self.entry_group))
        }
        self.commands = LazyCommands({**self.commands, **lazy})


class ExtensibleBench(ExtensibleGroup):
    """`ringlab bench`."""

    entry_group = "ringlab.bench"


def _command_of(entry: EntryPoint) -> Any:
    app = typer.Typer(add_completion=False)
    try:
        found = entry.load()
    except ImportError as error:
        app.command(entry.name, context_settings=_ANY_ARGUMENTS)(_unavailable(entry, error))
        return get_command(app)
    if not isinstance(found, typer.Typer):
        app.command(entry.name)(found)
        return get_command(app)
    group = get_group(found)
    group.name = entry.name
    return group


_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}


def _unavailable(entry: EntryPoint, error: ImportError) -> Any:
    """Return a command that reports why another cannot be imported, so that `--help` and the others still work."""
    package = entry.dist.name if entry.dist else entry.module.partition(".")[0]

    def unavailable() -> None:
        sys.exit(f"ringlab: the command {entry.name} cannot be imported: {error}; install {package} again")

    unavailable.__doc__ = f"Cannot be imported here: {error}."
    return unavailable
