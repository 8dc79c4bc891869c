"""Makes forbidden modules and functions unreachable in a worker.

ringlab's answers and packages about attention are not on the worker's disk. Importing one of them gives a
stand-in, which raises an error with an explanation when it is used. The import alone is allowed, because
notebooks compare their results with ringlab's. PyTorch and JAX are on the disk, because they are needed, but
their attention functions raise errors. So honest learners get an early message. A cheat is not stopped,
because anybody can paste code.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import py_compile
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import ringlab
from ringlab_course.checking.contract import ATTENTION
from ringlab_course.checking.forbidden import (
    MODULES_WITH_ATTENTION,
    OPERATORS,
    OTHERS,
    PACKAGES,
    OffLimits,
    holds_attention,
    is_ours,
    refuse,
)

HOME = Path(ringlab.__file__).resolve().parents[1]
"""The folder that contains both packages."""
_GONE = ("torch.nn.attention.flex_attention", "torch.onnx.ops")
"""Modules of PyTorch that are about attention, or contain it in their own operators."""
_KEYS = (
    "CPU", "AutogradCPU", "NestedTensorCPU", "AutogradNestedTensor", "QuantizedCPU", "MkldnnCPU",
    "CompositeImplicitAutograd", "CompositeExplicitAutograd",
)  # fmt: skip
"""The kernels through which an operator could be reached.

`decompose` uses the composite kernels, and nested tensors use their own.
"""
HIDDEN = ("ringlab_course/exercises", "ringlab_course/lessons", "ringlab/conformance")
"""Paths that are empty for a worker without limits: checks and answers."""


@cache
def hidden_paths(limits: OffLimits | None) -> tuple[str, ...]:
    """Return the files and folders that a worker does not see.

    Paths of ringlab are relative, as "ringlab/merge.py"; others are absolute.
    """
    if limits is None:
        return HIDDEN
    own = (path for package in PACKAGES for path in _hidden_below(limits, HOME / package, package))
    return (*(str(path.relative_to(HOME)) for path in own), *_packages_closed(limits), *_byte_code(limits))


def _byte_code(limits: OffLimits) -> Iterator[str]:
    """Yield the byte code of files that a worker sees rewritten."""
    for name in rewritten_files(limits):
        yield from map(str, _byte_code_of(HOME / name))


def _byte_code_of(path: Path) -> list[Path]:
    """Return the byte-code files of a source file.

    The byte code is compiled first, because a file that appears after a server has started would not be
    hidden from it.
    """
    if not Path(cache_from_source(path)).exists():
        with contextlib.suppress(OSError):  # the folder may be read-only
            py_compile.compile(str(path), quiet=2)
    return sorted(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))


def _packages_closed(limits: OffLimits) -> Iterator[str]:
    """Yield the folders and files of the forbidden packages, wherever a Python on this machine finds them."""
    roots = {Path(each) for each in ("/usr", "/usr/local", sys.prefix, sys.base_prefix, sys.exec_prefix)}
    folders = {Path(entry) for entry in sys.path if entry}
    folders |= {folder for root in roots for folder in root.glob("lib*/python3*/*-packages")}
    for folder in sorted({each.resolve() for each in folders}):
        for name in (*OTHERS, *limits.without):
            if limits.closes(name):
                yield from (str(path) for path in (folder / name, folder / f"{name}.py") if path.exists())


@cache
def rewritten_files(limits: OffLimits) -> dict[str, str]:
    """Return, by file, the text that a worker sees instead, without the functions in `limits.about`."""
    found = {}
    for module in sorted({place.rpartition(".")[0] for place in limits.about}):
        names = {place.rpartition(".")[2] for place in limits.about if place.rpartition(".")[0] == module}
        path = HOME.joinpath(*module.split(".")).with_suffix(".py")
        found[str(path.relative_to(HOME))] = _without(path.read_text(encoding="utf-8"), names)
    return found


def _without(text: str, names: set[str]) -> str:
    """Return the module's text with `names` set to None, and without the code that only they need."""
    tree, needed = ast.parse(text), set[str]()
    while True:
        kept = [node for node in tree.body if _stays(node, names) or (_gives(node) & needed) - names]
        wanted = {part.id for node in kept for part in ast.walk(node) if isinstance(part, ast.Name)}
        if wanted <= needed:
            break
        needed |= wanted
    imports = [node for node in kept if isinstance(node, (ast.Import, ast.ImportFrom))]
    empty = [f"{name} = None" for name in sorted(names)]
    return "\n".join(
        [*map(ast.unparse, imports), *empty, *(ast.unparse(node) for node in kept if node not in imports), ""]
    )


def _stays(node: ast.stmt, names: set[str]) -> bool:
    """Return whether a statement is kept even if nothing needs it.

    Such statements are imports, classes, and those that define a public name but none of `names`.
    """
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef)):
        return True
    given = _gives(node)
    return given.isdisjoint(names) and any(not name.startswith("_") for name in given)


def _gives(node: ast.stmt) -> set[str]:
    """Return the names to which a top-level statement of a module assigns a value."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    return {
        part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def _hidden_below(limits: OffLimits, folder: Path, package: str) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name == "__pycache__":
            continue
        module = f"{package}.{path.stem}"
        if limits.keeps(module) and f"{module}.__init__" not in limits.kept_modules:
            continue
        if path.is_dir() and any(kept.startswith(f"{module}.") for kept in limits.kept_modules):
            yield from _hidden_below(limits, path, module)
        elif path.is_dir() or path.suffix == ".py":
            yield path
            if path.suffix == ".py":
                yield from _byte_code_of(path)


class Refusing:
    """Replaces a forbidden object: it can be imported and passed on, but raises when it is used."""

    def __init__(self, called: str, name: str = "") -> None:
        self._called, self.name = called, name

    def __getattr__(self, name: str) -> Refusing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Refusing(f"{self._called}.{name}")

    def __call__(self, *arguments: Any, **keywords: Any) -> Refusing:
        home, _, own = self._called.rpartition(".")
        if own[:1].isupper() and not self.name:  # a class is called: its object may be created but not used
            return Refusing(self._called, home.rpartition(".")[2])
        return self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse(self._called)

    __iter__ = __len__ = __getitem__ = __instancecheck__ = __mro_entries__ = __enter__ = _refuse
    __array__ = __add__ = __radd__ = __mul__ = __rmul__ = __matmul__ = __float__ = _refuse


class _Absent(ModuleType):
    """A forbidden module."""

    def __getattr__(self, name: str) -> Refusing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Refusing(f"{self.__name__}.{name}")


class _Finder:
    """Replaces forbidden modules when they are imported, and disables attention in modules that contain it.

    This happens at every import, so attention stays disabled if a module is reloaded or removed from
    `sys.modules`.
    """

    def __init__(self, limits: OffLimits) -> None:
        self.limits, self._torch_closed = limits, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        attention = ATTENTION not in self.limits.may_use
        absent = is_ours(name) and not self.limits.keeps(name)
        absent = absent or self.limits.closes(name.partition(".")[0])
        if absent or (attention and any(name == gone or name.startswith(f"{gone}.") for gone in _GONE)):
            return self._absent(name, HOME.joinpath(*name.split(".")))
        if attention and name == "torch" and not self._torch_closed:
            self._torch_closed = True
            return _then(self._found(name, path, target), lambda module: _close_torch())
        if attention and MODULES_WITH_ATTENTION.fullmatch(name):
            return _then(self._found(name, path, target), _close_written)
        return None

    def _absent(self, name: str, folder: Path) -> Any:
        spec = importlib.machinery.ModuleSpec(name, self, is_package=folder.is_dir())  # type: ignore[arg-type]
        if folder.is_dir():
            spec.submodule_search_locations = [str(folder)]
        elif name.partition(".")[0] not in PACKAGES:
            # if a package is not installed, every part of it counts as absent
            spec.submodule_search_locations = []
        return spec

    def _found(self, name: str, path: Any, target: Any) -> Any:
        """Return the spec of a module from the first other finder that finds it, or None."""
        others = (finder for finder in sys.meta_path if finder is not self)
        return next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)

    def create_module(self, spec: Any) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because an absent module has no code."""


def _then(spec: Any, close: Callable[[ModuleType], None]) -> Any:
    """Return the spec, changed so that `close` is called with the module after the module is loaded."""
    if spec is not None and spec.loader is not None:
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            close(module)

        spec.loader.exec_module = exec_module
    return spec


def _close_torch() -> None:
    """Make every attention operator of PyTorch raise, under all of its names and in all of its kernels."""
    import torch

    library = torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
    ctypes.pythonapi.Py_IncRef(
        ctypes.py_object(library)
    )  # keeps the library alive, as its deletion would undo the registrations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for called in torch._C._dispatch_get_all_op_names():
            found = OPERATORS.match(called)
            for key in _KEYS if found else ():
                library.impl(found[1], key, _refusal(f"torch's {found[1]}"))  # type: ignore[index]


def _close_written(module: ModuleType) -> None:
    """Make every attention function and class that is written in this module raise."""
    for name, value in list(vars(module).items()):
        refusal = _refusal(f"{module.__name__}.{name}") if holds_attention(module.__name__, name) else None
        if refusal and isinstance(value, FunctionType):
            setattr(module, name, refusal)
        elif refusal and isinstance(value, type):
            for method in {"forward", "_forward_impl", "__call__"} & vars(value).keys():
                setattr(value, method, refusal)


def _refusal(called: str) -> Any:
    def refused(*_: Any, **__: Any) -> NoReturn:
        refuse(called)

    return refused


def install(limits: OffLimits) -> None:
    """Make everything forbidden unreachable for the code that this process is going to run."""
    sys.meta_path.insert(0, _Finder(limits))
    for place in limits.about:
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(module), name, Refusing(place))
