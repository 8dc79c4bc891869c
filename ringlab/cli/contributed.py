"""Commands that are imported when they are first needed, including commands of other packages."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from inspect import cleandoc
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group, solve_typer_info_defaults, solve_typer_info_help
from typer.models import TyperInfo


class _Later(NamedTuple):
    """A command that is not loaded yet. It wraps the command's entry point."""

    entry: EntryPoint


class LazyCommands(UserDict[str, Any]):
    """Commands by name. A command that is given as an entry point is loaded when it is first needed.

    The entry points of other packages are looked up if a name is unknown, or if all names are needed. They
    never replace a command that exists already.
    """

    def __init__(self, made: Mapping[str, Any], own: Mapping[str, str], entry_group: str) -> None:
        super().__init__(made)
        self.data |= {name: _Later(EntryPoint(name, where, entry_group)) for name, where in own.items()}
        self.entry_group: str | None = entry_group

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, _Later):
            found = self.data[name] = _command_of(found.entry)
        return found

    def __missing__(self, name: str) -> Any:
        if self.entry_group is not None and name in self:
            return self[name]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def listed(self) -> dict[str, Any]:
        """Return the commands without their options, for a list. Making the options takes most of the time."""
        return {
            name: _listed(found.entry) if isinstance(found, _Later) else found
            for name, found in self._all().items()
        }

    def _all(self) -> dict[str, Any]:
        if self.entry_group is not None:
            for entry in entry_points(group=self.entry_group):
                self.data.setdefault(entry.name, _Later(entry))
            self.entry_group = None
        return self.data


class ExtensibleGroup(TyperGroup):
    """A group of ringlab's commands and of other packages' commands, each imported when it is first needed.

    An entry point, in `own` or in the group `entry_group`, is the function of a command or the app of its
    subcommands.
    """

    entry_group: ClassVar[str]
    own: ClassVar[dict[str, str]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.lazy = self.commands = LazyCommands(self.commands, self.own, self.entry_group)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the group."""
        self.commands = self.lazy.listed()
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = self.lazy


class ExtensibleBench(ExtensibleGroup):
    """The command group `ringlab bench`."""

    entry_group = "ringlab.bench"


def _command_of(entry: EntryPoint) -> Any:
    try:
        found = entry.load()
    except ImportError as error:
        return _as_command(entry.name, _unavailable(entry, error), context_settings=_ANY_ARGUMENTS)
    if not isinstance(found, typer.Typer):
        return _as_command(entry.name, found)
    group = get_group(found)
    group.name = entry.name
    return group


def _as_command(name: str, function: Any, **settings: Any) -> Any:
    app = typer.Typer(add_completion=False)
    app.command(name, **settings)(function)
    return get_command(app)


def _listed(entry: EntryPoint) -> Any:
    """Return a command without options."""
    try:
        found = entry.load()
    except ImportError as error:
        found = _unavailable(entry, error)
    if not isinstance(found, typer.Typer):
        return TyperCommand(entry.name, help=cleandoc(found.__doc__ or ""))
    info = solve_typer_info_defaults(TyperInfo(found))
    return TyperCommand(
        entry.name,
        help=cleandoc(solve_typer_info_help(info) or ""),
        short_help=info.short_help,
        hidden=info.hidden,
        deprecated=bool(info.deprecated),
    )


_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}


def _unavailable(entry: EntryPoint, error: ImportError) -> Any:
    """Return a command that reports why a command cannot be imported, so that --help still works."""
    package = entry.dist.name if entry.dist else entry.module.partition(".")[0]

    def unavailable() -> None:
        sys.exit(f"ringlab: the command {entry.name} cannot be imported: {error}; install {package} again")

    unavailable.__doc__ = f"Cannot be imported here: {error}."
    return unavailable
