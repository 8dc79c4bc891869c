"""The modes of torch in which a program may call attention over a ring, and which of them are supported.

autocast               q, k and v are cast as torch's own attention casts them; the ring itself runs without autocast
create_graph=True      the gradients are correct, and raise an error if they are differentiated
torch.compile          attention is an operator of the graph; its backward gets forward's objects by a ticket
torch.func             an error is raised, as for forward-mode differentiation
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch  # torch has no public name for leaving all dispatch modes

from ringlab.errors import BackendError, GradientError
from ringlab.handles import Handled

F = TypeVar("F", bound=Callable[..., Any])


def as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return the tensors in the dtype of the active autocast, as torch's own attention would cast them.

    Without autocast the tensors stay unchanged. float64 tensors and values that are not tensors never
    change.

    >>> q, k = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     [x.dtype for x in as_autocast(q, k)]
    [torch.bfloat16, torch.float64]
    """
    return tuple(map(_cast, tensors))


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of the active autocast for this kind of device, or None if autocast is off."""
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def _cast(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    dtype = autocast_dtype(x.device.type)
    exempt = dtype is None or not x.is_floating_point() or x.dtype == torch.float64
    return x if exempt else x.to(dtype)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Return a context without autocast on this kind of device, so products keep their inputs' dtype."""
    return nullcontext() if autocast_dtype(kind) is None else torch.autocast(kind, enabled=False)


def refuse_transforms(*tensors: Any) -> None:
    """Check that neither torch.func nor forward-mode differentiation transforms the tensors.

    Raises: GradientError inside a transform of torch.func, or for a tensor with a forward-mode tangent.

    >>> torch.func.vmap(refuse_transforms)(torch.zeros(3))
    Traceback (most recent call last):
    ringlab.errors.GradientError: needed: attention over a ring outside torch.func and forward-mode differentiation
       got: a call inside torch.func.vmap
    remedy: loss.backward() or torch.autograd.grad for gradients, the batch axis instead of vmap
    """
    found = None
    if _transformed():
        found = f"torch.func.{torch._C._functorch.peek_interpreter_stack().key().name.lower()}"
    elif forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        found = "torch.autograd.forward_ad"
    if found is not None:
        raise GradientError(
            "attention over a ring outside torch.func and forward-mode differentiation",
            f"a call inside {found}",
            "loss.backward() or torch.autograd.grad for gradients, the batch axis instead of vmap",
        )


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context in which tensors can be made and sent as if no transform of torch.func were active."""
    if not _transformed():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # no public name for it

    return temporarily_clear_interpreter_stack()


def _transformed() -> bool:
    return bool(torch._C._are_functorch_transforms_active())  # torch has no public name for this test


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def outside_modes() -> AbstractContextManager[Any]:
    """Return a context without the dispatch modes of this thread, such as a meter of memory.

    Raises: BackendError if this version of torch has no such context.
    """
    found = getattr(_python_dispatch, "_disable_current_modes", None)
    if found is None:
        raise BackendError(
            "a torch with the private function torch.utils._python_dispatch._disable_current_modes, as 2.11 to 2.13",
            f"torch {torch.__version__}",
            "pip install 'torch>=2.11,<2.14'",
        )
    made: AbstractContextManager[Any] = found()
    return made


def graph_anchor(*inputs: Shaped[Tensor, "..."]) -> Shaped[Tensor, " 0"] | None:
    """Return an empty tensor that depends on `inputs` in autograd's graph, or None if no gradient is recorded.

    The tensor does not keep the memory of the inputs alive.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return None
    return torch.cat([x[:0].reshape(0) for x in inputs])


def differentiable_once(
    gradients: tuple[Float[Tensor, "..."], ...], *causes: Shaped[Tensor, "..."] | None
) -> tuple[Float[Tensor, "..."], ...]:
    """Return the gradients. If torch records operations, they raise an error when they are differentiated.

    causes: the tensors on which the gradients depend. Without this function, a loss on gradients, such as a
    gradient penalty, would be wrong without an error.
    """
    if not torch.is_grad_enabled():
        return gradients
    made: tuple[Tensor, ...] = _Once.apply(len(gradients), *gradients, *causes)
    return made


class _Once(torch.autograd.Function):
    """Returns the gradients unchanged, and raises an error if they are differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count] if x is not None)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivatives(ctx)


def refuse_second_derivatives(*_: Any) -> Any:
    """Raise an error. This function is the backward of the gradients of attention.

    Raises: GradientError.
    """
    raise GradientError(
        "first derivatives of attention over a ring",
        "a second derivative: a loss that depends on gradients of attention",
        "leave attention out of the penalty, or compute it on one process with "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
    )


def ends_graphs(function: F) -> F:
    """Return the function in a form that torch.compile does not trace: it ends the graph before a call."""
    outside = torch._disable_dynamo(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        # Outside torch.compile, call the function itself: `outside` would load the compiler, which takes 2
        # seconds.
        return (
            outside(*args, **options) if torch.compiler.is_dynamo_compiling() else function(*args, **options)
        )

    return cast(F, call)


def ticket_of(kept: Handled) -> Tensor:
    """Return a tensor of one number, the handle of `kept`. `kept` lives as long as the tensor's memory.

    A graph of torch.compile passes only tensors from forward to backward. This tensor keeps `kept` alive
    while backward may still run, and no longer.
    """
    ticket = torch.tensor(kept.handle, device="cpu")  # whatever the default device is
    weakref.finalize(ticket.untyped_storage(), _let_go, kept).atexit = False
    return ticket


def _let_go(kept: Handled) -> None:
    """Do nothing: the finalizer that calls this function held the only reference to `kept`."""


with torch.inference_mode(False):
    ORDER = torch.zeros((), dtype=torch.int64, device="cpu")
"""A tensor that nothing reads. Operators with side effects declare that they change it.

A graph of torch.compile therefore neither reorders nor drops these operators.
"""


def owned(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return `x` as a contiguous tensor with its own memory, because an operator must not return a view."""
    shared = x.untyped_storage().nbytes() != x.nbytes
    return x.clone(memory_format=torch.contiguous_format) if shared else x.contiguous()
