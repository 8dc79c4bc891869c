"""Loads the target "package.module:name" or "peer:name", or reports the missing part and similar names."""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringlab.conformance import peers
from ringlab.conformance.target.calling import name_of
from ringlab.conformance.target.claims import RING, Target, as_target
from ringlab.errors import BackendError

VIRTUAL = "virtual"


@dataclass(frozen=True)
class TargetSpec:
    """A target for any process: a reference to import, or the target itself, and the place where it runs.

    transport: "virtual", or a transport of `ringlab.launch`. claims: claims that replace the target's own.
    """

    what: str | Any
    transport: str = VIRTUAL
    device: str = "cpu"
    claims: dict[str, Any] = field(default_factory=dict)

    def target(self) -> Target:
        """Return the target. Raises: any error of its import."""
        if isinstance(self.what, str):
            return load(self.what, **self.claims)
        return as_target(self.what, **self.claims)

    def claiming(self, **claims: Any) -> TargetSpec:
        """Return the same target with these claims in place of its own claims."""
        return replace(self, claims={**self.claims, **claims})


def transport_of(over: str, transport: str) -> str:
    """Return the transport to use when `transport` was requested.

    A target that does not take a Ring runs over gloo instead of virtual ranks. over: "ring" or
    "torch.distributed", by which the target communicates.
    """
    if over == RING:
        return transport
    return "gloo" if transport == VIRTUAL else transport


def load(reference: str, **claims: Any) -> Target:
    """Return the target that `reference` names, as "package.module:function" or "peer:name", with these claims.

    The current directory is searched too.
    Raises: BackendError for an invalid reference, or a missing module or function; any error of the import.
    """
    module, colon, name = reference.partition(":")
    if not (module and colon and name):
        raise BackendError("a target as package.module:function, or peer:NAME", repr(reference))
    if module == "peer":
        return as_target(peers.target(name), **claims)
    target = as_target(resolve(module, name), **claims)
    if target.name == name_of(target.function):
        return replace(target, name=reference)
    return target


def named(reference: str) -> Any:
    """Return the object that "package.module:name" names. Raises: BackendError if it cannot be imported."""
    module, _, name = reference.partition(":")
    if not (module and name):
        raise BackendError("a function as package.module:function", repr(reference))
    try:
        return resolve(module, name)
    except BackendError:
        raise
    except (Exception, SystemExit) as error:
        remedy = (
            "guard the script's calls by if __name__ == '__main__'" if isinstance(error, SystemExit) else ""
        )
        raise BackendError(
            f"{module}, which can be imported", f"{type(error).__name__}: {error}", remedy
        ) from error


def resolve(module: str, name: str) -> Any:
    """Return the object `name` of `module`; `name` is dotted if the object is in a class.

    The current directory is searched too.
    Raises: BackendError if the module or the name is missing; any other error of the import.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    value: Any = _imported(module)
    for part in name.split("."):
        if not hasattr(value, part):
            raise BackendError(
                f"something called {name!r} in {module}",
                "nothing of that name",
                _near(part, (each for each in dir(value) if not each.startswith("_"))),
            )
        value = getattr(value, part)
    return value


def _imported(module: str) -> Any:
    if module.startswith(".") or "/" in module or os.sep in module or module.endswith(".py"):
        parts = [part for part in Path(module).with_suffix("").parts if part.isidentifier()]
        remedy = f"as in {'.'.join(parts) or 'package.module'}:function, from the folder that {parts[0] if parts else 'it'} lies in"
        raise BackendError("a module's name, as `import` takes it", repr(module), remedy)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but another module that it imports is missing
        raise _not_found(module, error.name) from None


def _not_found(module: str, missing: str) -> BackendError:
    """Return the error for a module; `missing` is the part of its dotted name that was not found."""
    package, _, last = missing.rpartition(".")
    if not package:
        where = f"neither in {os.getcwd()} nor among this Python's packages"
        remedy = _near(last, _top_level()) or "begin in the folder that it lies in, or install its package"
        return BackendError(f"a module called {module}", f"no {last}: {where}", remedy)
    inside = getattr(sys.modules.get(package), "__path__", None)
    if inside is None:
        return BackendError(
            f"a module called {module}", f"{package} is one, and holds no others", f"as in {package}:{last}"
        )
    there = (each.name for each in pkgutil.iter_modules(inside))
    return BackendError(f"a module called {module}", f"no {last} in {package}", _near(last, there))


def _top_level() -> Iterable[str]:
    """Yield the names that a single word can import, including plain folders, which may contain a module."""
    yield from (each.name for each in pkgutil.iter_modules())
    yield from (path.name for path in Path.cwd().iterdir() if path.is_dir() and path.name.isidentifier())


def _near(word: str, known: Iterable[str]) -> str:
    """Return a remedy if some known names are similar to `word`, else ""."""
    near = difflib.get_close_matches(word, sorted({*known}), 3)
    return f"there is {', '.join(near)}" if near else ""
