"""The functions that a submission may not call in place of its own work: ringlab's answers and PyTorch's attention.

In a worker the sources of what is off limits are not there, and importing it gives a stand-in that raises
once it is used, with words that say why. Importing alone costs nothing, as notebooks compare themselves
with ringlab. All this tells honest learners early; it is no wall, as whoever wants to can paste code.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import isfunction
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import ringlab
from ringlab import layout
from ringlab.errors import OffLimitsError
from ringlab.moved import new_name
from ringlab_course.checking.contract import ATTENTION, Exercise

HOME = Path(ringlab.__file__).resolve().parents[1]
"""The folder in which both packages lie."""
PACKAGES = ("ringlab", "ringlab_course")
LEFT_TO_OTHERS = (
    "`{}` leaves the work to ringlab or to PyTorch. This exercise is about writing it: put code of your own "
    "in its place."
)

NEEDED = (
    *(f"ringlab.{name}" for name in ("__init__", "errors", "types", "moved", "layout", "comm", "viz.__init__", "viz.frontend")),
    *(f"ringlab_course.{name}" for name in ("__init__", "judge")),
    *(f"ringlab_course.checking.{name}" for name in ("__init__", "contract", "failures", "faults", "requirements")),
    *(f"ringlab_course.notebook.{name}" for name in ("__init__", "corpus")),
)  # fmt: skip
"""The modules of ringlab that a worker needs, and those that notebooks use beside their answers."""
KERNELS = tuple(
    f"ringlab.blocks.triton.{name}" for name in ("__init__", "accesses", "interpreter", "rounding")
)
_OPERATORS = re.compile(
    r"aten::(\w*(?:scaled_dot_product|flash_attention|efficient_attention|cudnn_attention|multi_head_attention"
    r"|transformer_encoder_layer_fwd|triton_scaled_dot_attention)\w*(?:\.\w+)?)$"
)
_MODULES = re.compile(r"flex_attention|MultiheadAttention|Transformer(En|De)coder(Layer)?|Transformer")
_FLEX = "torch.nn.attention.flex_attention"


@dataclass(frozen=True)
class OffLimits:
    """may_use: what an exercise gives, modules of ringlab and `ATTENTION`. about: functions of kept modules it is about."""

    may_use: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    kernels: bool = False

    @staticmethod
    def of(exercise: Exercise) -> OffLimits:
        """Return what submissions of `exercise` may not use."""
        kernels = any(stage.kind == "kernel" for stage in exercise.stages)
        return OffLimits(exercise.may_use, exercise.about, kernels)

    def as_text(self) -> str:
        """Return what `from_text` reads."""
        return json.dumps([self.may_use, self.about, self.kernels])

    @staticmethod
    def from_text(text: str) -> OffLimits:
        """Return the limits that `as_text` wrote."""
        may_use, about, kernels = json.loads(text)
        return OffLimits(tuple(may_use), tuple(about), kernels)

    def keeps(self, module: str) -> bool:
        """Return whether the module `module` ("ringlab.…", "ringlab_course.…") is there."""
        return any(
            module in (kept, kept.removesuffix(".__init__")) or module.startswith(f"{kept}.")
            for kept in self._kept
        )

    @property
    def _kept(self) -> tuple[str, ...]:
        return (*NEEDED, *(KERNELS if self.kernels else ()), *self.may_use)

    def hidden_paths(self) -> tuple[str, ...]:
        """Return the files and folders of ringlab that a worker does not see, as in "ringlab/merge.py"."""
        return _hidden_paths(self)

    def refuses(self, module: str, name: str) -> bool:
        """Return whether the object called `name` of `module` is off limits."""
        if module.partition(".")[0] == "torch":
            return ATTENTION not in self.may_use and is_attention(name)
        module = new_name(module)
        return is_ours(module) and (not self.keeps(module) or f"{module}.{name}" in self.about)


@cache
def _hidden_paths(limits: OffLimits) -> tuple[str, ...]:
    return tuple(
        str(path.relative_to(HOME))
        for package in PACKAGES
        for path in _hidden_below(limits, HOME / package, package)
    )


def _hidden_below(limits: OffLimits, folder: Path, package: str) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name == "__pycache__":
            continue
        module = f"{package}.{path.stem}"
        if limits.keeps(module) and f"{module}.__init__" not in limits._kept:
            continue
        if path.is_dir() and any(kept.startswith(f"{module}.") for kept in limits._kept):
            yield from _hidden_below(limits, path, module)
        elif path.is_dir() or path.suffix == ".py":
            yield path
            yield from sorted(folder.glob(f"__pycache__/{path.stem}.*.pyc"))


def makers_of_layouts() -> tuple[str, ...]:
    """Return the dotted names of the functions that make layouts, and of the table that leads to them."""
    functions = [each for each in (*vars(layout).values(), *layout.LAYOUTS.values()) if isfunction(each)]
    makers = {f"{f.__module__}.{f.__name__}" for f in functions if _returns_a_layout(f)}
    return (*sorted(name for name in makers if "._" not in name), f"{layout.__name__}.LAYOUTS")


def _returns_a_layout(function: FunctionType) -> bool:
    stated = function.__annotations__.get("return")
    return stated is layout.Layout or str(stated).rpartition(".")[2] == "Layout"


def is_ours(module: str) -> bool:
    """Return whether a module is one of ringlab's or the course's."""
    return module.partition(".")[0] in PACKAGES and "." in module


def is_attention(name: str) -> bool:
    """Return whether PyTorch calls an attention of its own by this name."""
    return bool(_OPERATORS.match(f"aten::{name}") or _MODULES.fullmatch(name))


class Refusing:
    """Stands for something off limits: it may be imported and handed around, and raises where it is used."""

    def __init__(self, called: str, name: str = "") -> None:
        self._called, self.name = called, name

    def __getattr__(self, name: str) -> Refusing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Refusing(f"{self._called}.{name}")

    def __call__(self, *arguments: Any, **keywords: Any) -> Refusing:
        home, _, own = self._called.rpartition(".")
        if own[:1].isupper() and not self.name:  # making an object is no use of it yet
            return Refusing(self._called, home.rpartition(".")[2])
        return self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse(self._called)

    __iter__ = __len__ = __getitem__ = __instancecheck__ = __mro_entries__ = __enter__ = _refuse
    __array__ = __add__ = __radd__ = __mul__ = __rmul__ = __matmul__ = __float__ = _refuse


def refuse(called: str) -> NoReturn:
    """Raise the OffLimitsError about `called`."""
    raise OffLimitsError(
        "code of your own: writing it is what this exercise is about", called, "write it yourself"
    )


class _Absent(ModuleType):
    """A module that is off limits."""

    def __getattr__(self, name: str) -> Refusing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Refusing(f"{self.__name__}.{name}")


class _Finder:
    """Answers for modules that are off limits before anybody else can; also knows when torch is first imported."""

    def __init__(self, limits: OffLimits) -> None:
        self.limits, self._closed = limits, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        attention = ATTENTION not in self.limits.may_use
        if name == "torch" and attention and not self._closed:
            self._closed = True
            return _closing(importlib.util.find_spec(name))
        today = new_name(name)
        absent = is_ours(today) and not self.limits.keeps(today)
        if not absent and not (name == _FLEX and attention):
            return None
        folder = HOME.joinpath(*today.split("."))
        spec = importlib.machinery.ModuleSpec(name, self, is_package=folder.is_dir())  # type: ignore[arg-type]
        if folder.is_dir():
            spec.submodule_search_locations = [str(folder)]
        return spec

    def create_module(self, spec: Any) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def _closing(spec: Any) -> Any:
    """Return torch's spec, changed so that its attention is closed as soon as it is there."""
    if spec is not None and spec.loader is not None:
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _close_torch()

        spec.loader.exec_module = exec_module
    return spec


_libraries: list[Any] = []  # their registrations are undone when they are collected


def _close_torch() -> None:
    """Have every attention operator of PyTorch raise, by whichever of its names it is called."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for called in torch._C._dispatch_get_all_op_names():
            found = _OPERATORS.match(called)
            for key in ("CPU", "AutogradCPU") if found else ():
                library.impl(found[1], _refusal(f"torch's {found[1]}"), key)  # type: ignore[index]
    torch.nn.functional.multi_head_attention_forward = _refusal("torch.nn.MultiheadAttention")


def _refusal(called: str) -> Any:
    def refused(*_: Any, **__: Any) -> NoReturn:
        refuse(called)

    return refused


def install(limits: OffLimits) -> None:
    """Put all that is off limits out of reach of the code that this process is going to run."""
    sys.meta_path.insert(0, _Finder(limits))
    for place in limits.about:
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(module), name, Refusing(place))
