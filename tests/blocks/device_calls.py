"""Assumptions of GPU code about its arguments, asserted at each call; no GPU is needed.

On a CPU a wrong argument can give right results: torch's CPU operators honour strides that the CUDA kernels never see, and
a test of values passes. So each operator that a CUDA tensor would reach has rules here. A rule is a sentence and a
predicate of the call; the spies check all rules of an operator before they pass the call on to a stand-in.

Sources: PyTorch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp and attention_backward.cu, in which
`softmax_lse.data_ptr()` is read as dense (B, H, L), and ProcessGroupNCCL.cpp, which only warns of a message that is not
contiguous; the docstrings of ringlab/blocks/triton/kernels.py.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ringlab.blocks import native
from ringlab.blocks.triton.block import DTYPES

Call = dict[str, Any]
Rules = dict[str, Callable[[Call], bool]]


class TakenForGranted(AssertionError):
    """A call that breaks a rule of its operator."""


def check(operator: str, call: Call) -> None:
    """Check that the call keeps all rules of `operator`. Raises: TakenForGranted with the broken rules."""
    broken = [rule for rule, kept in RULES[operator].items() if not kept(call)]
    if broken:
        raise TakenForGranted(f"{operator}: {'; '.join(broken)}")


def tensors(call: Call) -> list[Tensor]:
    return [x for x in call.values() if isinstance(x, Tensor)]


def one_device(call: Call) -> bool:
    return len({x.device for x in tensors(call)}) == 1


# torch's flash attention on CUDA.
_ROWS = ("dout", "q", "k", "v", "out")


def _each(call: Call) -> list[Tensor]:
    return [call[name] for name in _ROWS if name in call]


def _aligned(x: Tensor) -> bool:
    return all(place % 16 == 0 for place in (x.data_ptr(), *(n * x.element_size() for n in x.stride()[:-1])))


_FLASH: Rules = {
    "tensors on one device": one_device,
    "four axes, none of them empty": lambda c: all(x.ndim == 4 and x.numel() for x in _each(c)),
    "one dtype, of 16 bits": lambda c: {x.dtype for x in _each(c)} in ({torch.float16}, {torch.bfloat16}),
    "a head dim that is a multiple of 8, to 256": lambda c: all(
        x.shape[-1] == c["q"].shape[-1] and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 for x in _each(c)
    ),
    "k and v alike, of the batch of q": lambda c: (
        c["k"].shape[:3] == c["v"].shape[:3] and c["k"].shape[0] == c["q"].shape[0]
    ),
    "query heads divisible by key/value heads": lambda c: c["q"].shape[1] % c["k"].shape[1] == 0,
    "a causal tile that is square": lambda c: not c["causal"] or c["q"].shape[2] == c["k"].shape[2],
    "dense head dims": lambda c: all(x.stride(-1) == 1 for x in _each(c)),
    "rows at multiples of 16 bytes": lambda c: all(map(_aligned, _each(c))),
}
_FLASH_BACKWARD: Rules = {
    "dout and out of the shape of q": lambda c: c["dout"].shape == c["out"].shape == c["q"].shape,
    "lse in float32": lambda c: c["lse"].dtype == torch.float32,
    "lse of (B, H, L)": lambda c: c["lse"].shape == c["q"].shape[:3],
    "a dense lse": lambda c: c["lse"].is_contiguous(),
}

# The Triton kernels.
_STRIDED = {"Q": "q", "K": "k", "V": "v", "DOUT": "dout"}


def _strided(call: Call) -> list[tuple[Tensor, str]]:
    return [(call[name], short) for name, short in _STRIDED.items() if name in call]


def _sizes(call: Call) -> tuple[int, int, int, int, int, int, int]:
    (B, H, L, D), (_, K, Lk, _) = call["Q"].shape, call["K"].shape
    return B, H, K, L, Lk, D, call["V"].shape[-1]


def _results(call: Call) -> list[tuple[Tensor, tuple[int, ...], torch.dtype]]:
    """Return the dense tensors that a kernel reads or writes, each with its expected shape and dtype."""
    (B, H, K, L, Lk, D, Dv), own, state = _sizes(call), call["Q"].dtype, torch.float32
    rows = (B, H, L)
    found: list[tuple[Tensor, tuple[int, ...], torch.dtype]] = []
    if "OUT" in call:
        if not (call["FIRST"] and call["LAST"]):
            found += [
                (call["ACC"], (*rows, Dv), state),
                (call["M"], rows, state),
                (call["TOTAL"], rows, state),
            ]
        if call["LAST"]:
            found += [(call["OUT"], (*rows, Dv), own), (call["LSE"], rows, state)]
        return found
    found += [(call["LSE"], rows, state), (call["DELTA"], rows, state)]
    if "DK" in call:
        return [*found, (call["DK"], (B, K, Lk, D), state), (call["DV"], (B, K, Lk, Dv), state)]
    if not (call["FIRST"] and call["LAST"]):
        found.append((call["ACC"], (*rows, D), state))
    return [*found, (call["DQ"], (*rows, D), own)] if call["LAST"] else found


def _tables(call: Call) -> list[tuple[Tensor, tuple[int, ...]]]:
    segments = len(call["SEGMENTS"])
    found = [(call["PROGRAMS"], (call["n_programs"], 4)), (call["SEGMENTS"], (segments, 4))]
    found += [(call["LOWS"], (segments,))] if call["WINDOW"] else []
    lengths = call["Q"].shape[2], call["K"].shape[2]
    positions = zip((call["ROWS_AT"], call["KEYS_AT"]), lengths, strict=True)
    return found + ([(x, (length,)) for x, length in positions] if call["DROPOUT"] else [])


def _within(call: Call) -> bool:
    """Return whether programs own existing rows (dkv: keys) and segments are within the other axis."""
    owned, walked = call["Q"].shape[2], call["K"].shape[2]
    if "DK" in call:
        owned, walked = walked, owned
    segments = call["SEGMENTS"][:, :4]
    start, stop, first, last = call["PROGRAMS"][:, :4].unbind(-1)
    used = [segments[int(a) : int(b)] for a, b in zip(first, last, strict=True)]
    begin, split, end, _ = torch.cat([segments[:0], *used]).unbind(-1)
    right = (0 <= start) & (start < stop) & (stop <= owned) & (first <= last) & (last <= len(segments))
    return bool(right.all() and ((0 <= begin) & (begin <= split) & (split <= end) & (end <= walked)).all())


def _constants(call: Call) -> bool:
    _, H, K, L, Lk, D, Dv = _sizes(call)
    padded = {"BLOCK_D": D, "BLOCK_V": Dv}
    power = all(call[name] >= dim and call[name].bit_count() == 1 for name, dim in padded.items())
    given = call["n_rows"], call["H"], call["GROUP"], call["HEAD_DIM"], call["VALUE_DIM"]
    keys = call.get("n_keys", Lk)
    return power and given == (L, H, H // K, D, Dv) and keys == Lk and call["n_programs"] > 0


_TRITON: Rules = {
    "tensors on one device": one_device,
    "launched on the device of its tensors": lambda c: (
        not c["Q"].is_cuda or torch.cuda.current_device() == c["Q"].device.index
    ),
    "q, k, v and dout of one dtype": lambda c: (
        len({x.dtype for x, _ in _strided(c)}) == 1 and c["Q"].dtype in DTYPES
    ),
    "dense head dims": lambda c: all(x.stride(-1) == 1 for x, _ in _strided(c)),
    "the strides of the tensors themselves": lambda c: all(
        tuple(c[f"{short}_{axis}"] for axis in "bhl") == x.stride()[:3] for x, short in _strided(c)
    ),
    "offsets within a tile of 32 bits": lambda c: all(x.stride(2) < 2**22 for x, _ in _strided(c)),
    "sizes that are those of the tensors": _constants,
    "a program for each entry and head": lambda c: (
        c["grid"] == c["n_programs"] * c["Q"].shape[0] * c["K" if "DK" in c else "Q"].shape[1]
    ),
    "dense states and results": lambda c: all(x.is_contiguous() for x, _, _ in _results(c)),
    "states and results of their shapes": lambda c: all(x.shape == shape for x, shape, _ in _results(c)),
    "states in float32, results in their dtypes": lambda c: all(
        x.dtype == kind for x, _, kind in _results(c)
    ),
    "dense int32 tables": lambda c: all(x.dtype == torch.int32 and x.is_contiguous() for x, _ in _tables(c)),
    "tables of their shapes": lambda c: all(x.shape == shape for x, shape in _tables(c)),
    "tables within the tensors": lambda c: isinstance(c["Q"], FakeTensor) or _within(c),
}

# Messages: NCCL sends and receives `numel` elements of a tensor, from its first address on.
NCCL_DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
)  # fmt: skip


def _span(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()


def _apart(call: Call) -> bool:
    """Return whether no message is received into memory that another message of the batch reads or writes."""
    spans = [(*_span(x), into) for x, into in zip(call["tensors"], call["received"], strict=True)]
    return not any(
        a[0] < b[1] and b[0] < a[1] and (a[2] or b[2]) for i, a in enumerate(spans) for b in spans[:i]
    )


_EXCHANGE: Rules = {
    "contiguous messages": lambda c: all(x.is_contiguous() for x in c["tensors"]),
    "no empty message": lambda c: all(x.numel() for x in c["tensors"]),
    "dtypes that NCCL knows": lambda c: all(x.dtype in NCCL_DTYPES for x in c["tensors"]),
    "tensors on one device": lambda c: len({x.device for x in c["tensors"]}) <= 1,
    "no message for the rank itself": lambda c: c["rank"] not in c["peers"],
    "received where nothing else is read or written": _apart,
}

RULES: dict[str, Rules] = {
    "flash_forward": _FLASH,
    "flash_backward": _FLASH | _FLASH_BACKWARD,
    "forward_step": _TRITON,
    "backward_dq": _TRITON,
    "backward_dkv": _TRITON,
    "exchange": _EXCHANGE,
}

Told = Callable[[str, Call], None]


def _as_cuda_reads(lse: Tensor) -> Tensor:
    """Return the numbers that the CUDA kernel reads as `lse`, which it treats as a dense tensor."""
    return torch.as_strided(
        lse, lse.shape, torch.empty_like(lse, memory_format=torch.contiguous_format).stride()
    )


@contextmanager
def flash_operators(tell: Told = check) -> Iterator[None]:
    """Run the native block's CUDA path on CPU tensors, by stand-ins that read lse as CUDA kernels do."""
    aten = torch.ops.aten

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float) -> Any:
        tell("flash_forward", {"q": q, "k": k, "v": v, "causal": causal})
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)
        return out, lse.contiguous()  # dense as on CUDA; on the CPU its strides are those of (B, L, H)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
    ) -> Any:
        _, _, max_q, max_k, dropout, causal, *_ = rest
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        tell(
            "flash_backward", {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "causal": causal}
        )
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, _as_cuda_reads(lse), dropout, causal, scale=scale
        )

    operators = SimpleNamespace(
        _scaled_dot_product_flash_attention=forward, _scaled_dot_product_flash_attention_backward=backward
    )
    with (
        mock.patch.object(native, "_aten", operators),
        mock.patch.object(native, "on_cuda", lambda x: True),
    ):
        yield


@contextmanager
def triton_launches(tell: Told = check) -> Iterator[None]:
    """Do not run the kernels; pass their launches, with named arguments and the grid, to `tell`."""
    from ringlab.blocks.triton import kernels

    class Launch:
        def __init__(self, name: str) -> None:
            self.name, self.names = name, getattr(kernels, name).arg_names

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(*args: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
                given = dict(zip(self.names, args, strict=False)) | constants
                assert set(given) == set(self.names) and num_warps and num_stages
                tell(self.name, given | {"grid": grid[0]})

            return launch

    names = ("forward_step", "backward_dq", "backward_dkv")
    with mock.patch.multiple(kernels, **{name: Launch(name) for name in names}):
        yield


@contextmanager
def messages(tell: Told = check) -> Iterator[None]:
    """Pass every batch of sends and receives to `tell`, then run the batch."""
    batch = dist.batch_isend_irecv

    def told(ops: list[dist.P2POp]) -> Any:
        received = [op.op is dist.irecv for op in ops]
        call = {"tensors": [op.tensor for op in ops], "received": received, "peers": [op.peer for op in ops]}
        tell("exchange", call | {"rank": dist.get_rank()})
        return batch(ops)

    with mock.patch.object(dist, "batch_isend_irecv", told):
        yield


@contextmanager
def rewritten(owner: Any, name: str, old: str, new: str) -> Iterator[None]:
    """Replace `old` by `new` in the source of a function or method for the time of the context."""
    function = inspect.unwrap(getattr(owner, name))
    text = textwrap.dedent(inspect.getsource(function))
    assert old in text, f"{old!r} is not in {name}"
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + text.replace(old, new), function.__globals__, made)
    with mock.patch.object(owner, name, made[name]):
        yield
