"""docs/cli.md: every command with its help, its arguments and its options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from ringlab.cli import app

from ..website.links import escape, table

HEAD = """\
# Commands

Run `. .venv/bin/activate` first, because the commands are in `.venv/bin`. `ringlab COMMAND --help` prints the same text in a
terminal. With `--json` a command prints one object (`kernels`: a list) and nothing else on standard output. The exit status is 1
if something is wrong, and 2 for an invalid command line.
"""
_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def page() -> str:
    """Return the page of all commands."""
    every = list(_commands("ringlab", typer.main.get_command(app)))
    rows = [
        (f"[`{name}`](#{name.replace(' ', '-')})", escape(_first_line(command))) for name, command in every
    ]
    parts = [
        HEAD,
        table(("Command", "What it does"), rows),
        *(_section(name, command) for name, command in every),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield (full name, command) for each command that is not a group, in the order of `ringlab --help`."""
    if not hasattr(command, "list_commands"):
        yield name, command
        return
    context = command.make_context(name, [], resilient_parsing=True)
    for each in command.list_commands(context):
        yield from _commands(f"{name} {each}", command.get_command(context, each))


def _section(name: str, command: Any) -> str:
    parameters = [
        each for each in command.params if not getattr(each, "hidden", False) and each.name != "help"
    ]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option"]
    usage = " ".join([name, *map(_argument, arguments), *(["[OPTIONS]"] if options else [])])
    parts = [f"## {name}", _help(command), f"```text\n{usage}\n```"]
    if arguments:
        described = [(f"`{_argument(each)}`", escape(each.help or "")) for each in arguments]
        parts.append(table(("Argument", ""), described))
    panels = dict.fromkeys(each.rich_help_panel for each in options)
    for panel in panels:
        rows = [_row(each, command) for each in options if each.rich_help_panel == panel]
        parts.append(table((escape(panel or "Option"), "Default", ""), rows))
    return "\n\n".join(parts)


def _help(command: Any) -> str:
    """Return a command's help as paragraphs; a paragraph that shows a command becomes a block of code."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))
    return "\n\n".join(
        f"```sh\n{text}\n```" if text.startswith("ringlab ") else escape(" ".join(text.split()))
        for text in paragraphs
    )


def _first_line(command: Any) -> str:
    return " ".join(re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))[0].split())


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).strip("{}[]").removesuffix("...").upper()
    many = "..." if parameter.nargs == -1 else ""
    return f"{name}{many}" if parameter.required else f"[{name}{many}]"


def _row(parameter: Any, command: Any) -> tuple[str, str, str]:
    names = ", ".join((*parameter.opts, *parameter.secondary_opts))
    value = "" if parameter.is_flag else f" {parameter.metavar or _placeholder(parameter, command)}"
    return f"`{names}{value}`", _default(parameter), escape(parameter.help or "")


def _placeholder(parameter: Any, command: Any) -> str:
    """Return a placeholder for a value of the parameter's type."""
    annotation = inspect.signature(command.callback, eval_str=True).parameters[parameter.name].annotation
    found = _types(annotation)
    return next((text for kind, text in _PLACEHOLDERS.items() if kind in found), "VALUE")


def _types(annotation: Any) -> set[Any]:
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    return {annotation}.union(*map(_types, get_args(annotation)))


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.secondary_opts:
        return f"`{(parameter.opts if value else parameter.secondary_opts)[0]}`"
    if value is None or value is False or value == "" or callable(value) or isinstance(value, tuple | list):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
