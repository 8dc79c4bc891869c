"""The code that a submission may not call instead of writing its own: ringlab's answers, PyTorch's attention.

The notebook's `check()` watches for such calls while the learner's function runs (`guard`). The judge makes
this code unreachable in its workers (`ringlab_course.judge.removal`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from inspect import isfunction
from types import FunctionType
from typing import NoReturn

from ringlab import layout
from ringlab.errors import OffLimitsError
from ringlab_course.checking.contract import ATTENTION, Exercise

PACKAGES = ("ringlab", "ringlab_course")

NEEDED = (
    *(f"ringlab.{name}" for name in ("__init__", "errors", "handles", "types", "arrays", "layout", "upload", "comm", "viz.__init__", "viz.frontend")),
    *(f"ringlab_course.{name}" for name in ("__init__", "judge")),
    *(f"ringlab_course.checking.{name}" for name in ("__init__", "contract", "failures", "faults", "forbidden", "guard")),
    *(f"ringlab_course.checking.{name}" for name in ("protocol", "requirements", "ring_rules")),
    *(f"ringlab_course.notebook.{name}" for name in ("__init__", "corpus")),
)  # fmt: skip
"""The modules of ringlab that a worker needs, and those that notebooks use outside of the graded functions."""
KERNELS = (
    *(f"ringlab.blocks.triton.{name}" for name in ("__init__", "interpreter", "rounding")),
    "ringlab_course.checking.accesses",
)
OPERATORS = re.compile(
    r"aten::(\w*(?:scaled_dot_product|flash_attention|efficient_attention|cudnn_attention|multi_head_attention"
    r"|transformer_encoder_layer_fwd|triton_scaled_dot_attention)\w*(?:\.\w+)?)$"
)
_ATTENTION_CLASSES = re.compile(
    r"flex_attention|MultiheadAttention|Transformer(En|De)coder(Layer)?|Transformer"
)
MODULES_WITH_ATTENTION = re.compile(
    r"torch\.(nn\.functional|ao\.nn\.quantizable\.modules\.activation|nested\._internal\.sdpa|sparse\._triton_ops"
    r"|testing\._internal\..*|nn\.attention\.(experimental\..*|varlen)|_higher_order_ops\.flex_attention"
    r"|distributed\.tensor\.experimental\..*)|jax\._src\.(nn\.functions|cudnn\..*)|jax\.experimental\.pallas\.ops\..*"
)
_ATTENTION_NAMES = re.compile(r"attention|attn|sdpa", re.IGNORECASE)
"""The modules with attention written in Python, and the names in them that a submission may not call."""
OTHERS = (
    "diffusers", "flash_attn", "flax", "keras", "ring_attention_pytorch", "ring_flash_attn", "transformers", "xformers", "yunchang",
)  # fmt: skip
"""Packages about attention that may be installed on the machine that grades a class."""


@dataclass(frozen=True)
class OffLimits:
    """The code that submissions of one exercise may not use.

    may_use, about and without are those of `Exercise`. kernels: whether the exercise runs kernels, which need
    more modules of ringlab.
    """

    may_use: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    kernels: bool = False
    without: tuple[str, ...] = ()

    @staticmethod
    def of(exercise: Exercise) -> OffLimits:
        """Return the limits for submissions of `exercise`."""
        kernels = any(stage.kind == "kernel" for stage in exercise.stages)
        return OffLimits(exercise.may_use, exercise.about, kernels, exercise.without)

    def as_text(self) -> str:
        """Return the limits as text that `from_text` can read."""
        return json.dumps([self.may_use, self.about, self.kernels, self.without])

    @staticmethod
    def from_text(text: str) -> OffLimits:
        """Return the limits that `as_text` wrote."""
        may_use, about, kernels, without = json.loads(text)
        return OffLimits(tuple(may_use), tuple(about), kernels, tuple(without))

    def keeps(self, module: str) -> bool:
        """Return whether submissions can import the module `module` ("ringlab.…", "ringlab_course.…")."""
        return any(
            module in (kept, kept.removesuffix(".__init__")) or module.startswith(f"{kept}.")
            for kept in self.kept_modules
        )

    @property
    def kept_modules(self) -> tuple[str, ...]:
        return (*NEEDED, *(KERNELS if self.kernels else ()), *self.may_use)

    def closes(self, package: str) -> bool:
        """Return whether a third-party package is off limits as a whole."""
        return package in (*self.without, *(OTHERS if ATTENTION not in self.may_use else ()))

    def refuses(self, module: str, name: str) -> bool:
        """Return whether the object called `name` of `module` is off limits."""
        package = module.partition(".")[0]
        attention = holds_attention(module, name) or (package == "torch" and is_attention(name))
        if self.closes(package) or (ATTENTION not in self.may_use and attention):
            return True
        return is_ours(module) and (not self.keeps(module) or f"{module}.{name}" in self.about)


def makers_of_layouts() -> tuple[str, ...]:
    """Return the dotted names of the functions that make layouts, and of the table that leads to them."""
    functions = [each for each in (*vars(layout).values(), *layout.LAYOUTS.values()) if isfunction(each)]
    makers = {f"{f.__module__}.{f.__name__}" for f in functions if _returns_a_layout(f)}
    return (*sorted(name for name in makers if "._" not in name), f"{layout.__name__}.LAYOUTS")


def _returns_a_layout(function: FunctionType) -> bool:
    stated = function.__annotations__.get("return")
    return stated is layout.Layout or str(stated).rpartition(".")[2] == "Layout"


def is_ours(module: str) -> bool:
    """Return whether a module belongs to ringlab or the course."""
    return module.partition(".")[0] in PACKAGES and "." in module


def is_attention(name: str) -> bool:
    """Return whether `name` is the name of an attention function or class of PyTorch."""
    return bool(OPERATORS.match(f"aten::{name}") or _ATTENTION_CLASSES.fullmatch(name))


def holds_attention(module: str, name: str) -> bool:
    """Return whether `name` in this module of PyTorch or JAX is an attention written in Python."""
    return bool(MODULES_WITH_ATTENTION.fullmatch(module) and _ATTENTION_NAMES.search(name))


def refuse(called: str) -> NoReturn:
    """Raise the OffLimitsError about `called`."""
    raise OffLimitsError(
        "code of your own: writing it is what this exercise is about", called, "write it yourself"
    )
