"""Assumptions of GPU code about its arguments, asserted at each call; no GPU is needed.

On a CPU a wrong argument can give right results: torch's CPU operators honour strides that the CUDA kernels never see, and
a test of values passes. So each operator that a CUDA tensor would reach has rules here. A rule is a sentence and a
predicate of the call; the spies check all rules of an operator before they pass the call on to a stand-in.

Sources: PyTorch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp and attention_backward.cu, in which
`softmax_lse.data_ptr()` is read as dense (B, H, L); PyTorch's sdp_utils.cpp and cudnn/MHA.cpp, in which cuDNN's lse is
(B, H, L, 1), a single key is refused, and addresses are multiples of 16 bytes; ProcessGroupNCCL.cpp, which only warns of a
message that is not contiguous; the docstrings of ringlab/blocks/triton/kernels.py; csrc/flash_attn/flash_api.cpp,
hopper/flash_api.cpp and flash_attn/cute/interface.py of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from ringlab.blocks import cudnn, flash, flex, library, native
from ringlab.blocks.triton.block import DTYPES

Call = dict[str, Any]
Rules = dict[str, Callable[[Call], bool]]


class TakenForGranted(AssertionError):
    """A call that breaks a rule of its operator."""


def check(operator: str, call: Call) -> None:
    """Check that the call obeys all rules of `operator`. Raises: TakenForGranted with the broken rules."""
    broken = [rule for rule, kept in RULES[operator].items() if not kept(call)]
    if broken:
        raise TakenForGranted(f"{operator}: {'; '.join(broken)}")


def tensors(call: Call) -> list[Tensor]:
    return [x for x in call.values() if isinstance(x, Tensor)]


def one_device(call: Call) -> bool:
    return len({x.device for x in tensors(call)}) == 1


# torch's flash attention on CUDA, cuDNN's attention, and flash-attn.
_ROWS = ("dout", "q", "k", "v", "out")


def _each(call: Call) -> list[Tensor]:
    return [call[name] for name in _ROWS if name in call]


def _aligned(x: Tensor) -> bool:
    return all(place % 16 == 0 for place in (x.data_ptr(), *(n * x.element_size() for n in x.stride()[:-1])))


def _head_dims(call: Call, own_value_dims: bool) -> bool:
    """Return whether head dims are multiples of 8 up to 256, and equal for q and k, and for v, out and dout.

    Unless `own_value_dims`, the head dim of v must be that of q.
    """
    of_v = {call[name].shape[-1] for name in ("v", "out", "dout") if name in call}
    of_q = {call[name].shape[-1] for name in ("q", "k")}
    alike = len(of_v) == len(of_q) == 1 and (own_value_dims or of_v == of_q)
    return alike and all(dim % 8 == 0 and dim <= 256 for dim in of_q | of_v)


def _rules_of_tensors(heads: int, own_value_dims: bool) -> Rules:
    """Return the rules about the tensors of a library's forward. heads: the axis of heads."""
    return {
        "tensors on one device": one_device,
        "one dtype, of 16 bits": lambda c: {x.dtype for x in _each(c)} in ({torch.float16}, {torch.bfloat16}),
        "head dims that are multiples of 8, to 256": lambda c: _head_dims(c, own_value_dims),
        "k and v alike": lambda c: c["k"].shape[:-1] == c["v"].shape[:-1],
        "query heads divisible by key/value heads": lambda c: c["q"].shape[heads] % c["k"].shape[heads] == 0,
        "dense head dims": lambda c: all(x.stride(-1) == 1 for x in _each(c)),
        "rows at multiples of 16 bytes": lambda c: all(map(_aligned, _each(c))),
        "no broadcast axes": lambda c: all(
            step or size == 1 for x in _each(c) for step, size in zip(x.stride(), x.shape, strict=True)
        ),
    }


def _forward_rules(heads: int = 1, own_value_dims: bool = False, shortest: int = 1) -> Rules:
    """Return the rules of a library's forward. heads: the axis of heads, 1 or 2; tokens are on the other one."""
    tokens = 3 - heads
    return {
        "four axes, none of them empty": lambda c: all(x.ndim == 4 and x.numel() for x in _each(c)),
        **_rules_of_tensors(heads, own_value_dims),
        "one batch": lambda c: c["k"].shape[0] == c["q"].shape[0],
        "a causal tile that is square": lambda c: (
            not c["causal"] or c["q"].shape[tokens] == c["k"].shape[tokens]
        ),
        "enough rows and keys": lambda c: min(c["q"].shape[tokens], c["k"].shape[tokens]) >= shortest,
    }


def _backward_rules(shape: Callable[[Tensor], tuple[int, ...]] = lambda q: tuple(q.shape[:3])) -> Rules:
    """Return the additional rules of a library's backward. shape: returns the shape of lse, given q."""
    return {
        "dout and out of the rows of q": lambda c: (
            c["dout"].shape == c["out"].shape and c["out"].shape[:-1] == c["q"].shape[:-1]
        ),
        "lse in float32": lambda c: c["lse"].dtype == torch.float32,
        "lse of its shape": lambda c: c["lse"].shape == shape(c["q"]),
        "a dense lse": lambda c: c["lse"].is_contiguous(),
    }


# flash-attn's functions for sequences of varying length: one axis of tokens, and tables that say where sequences end.
_BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")


def lengths_of(call: Call, which: str) -> list[int]:
    """Return the lengths of the sequences of rows ("q") or keys ("k")."""
    bounds = call[f"cu_seqlens_{which}"].tolist()
    return [stop - start for start, stop in pairwise(bounds)]


def _bounded(call: Call, which: str) -> bool:
    bounds = call[f"cu_seqlens_{which}"].tolist()
    return bounds[0] == 0 and bounds[-1] == len(call[which]) and min(lengths_of(call, which)) > 0


_VARLEN: Rules = {
    "three axes, none of them empty": lambda c: all(x.ndim == 3 and x.numel() for x in _each(c)),
    **_rules_of_tensors(1, False),
    "dense int32 bounds": lambda c: all(
        c[name].dtype == torch.int32 and c[name].ndim == 1 and c[name].is_contiguous() for name in _BOUNDS
    ),
    "as many sequences of rows as of keys": lambda c: c[_BOUNDS[0]].shape == c[_BOUNDS[1]].shape,
    "bounds of all tokens, and no empty sequence": lambda c: all(_bounded(c, which) for which in "qk"),
    "the length of the longest sequence": lambda c: all(
        c[f"max_seqlen_{which}"] == max(lengths_of(c, which)) for which in "qk"
    ),
    "causal sequences that are square": lambda c: not c["causal"] or lengths_of(c, "q") == lengths_of(c, "k"),
}


# The Triton kernels.
_STRIDED = {"Q": "q", "K": "k", "V": "v", "DOUT": "dout"}


def _strided(call: Call) -> list[tuple[Tensor, str]]:
    return [(call[name], short) for name, short in _STRIDED.items() if name in call]


def _steps(x: Tensor) -> tuple[int, ...]:
    """Return the first three strides; for an axis of size 1, rounded down to a multiple of the unit."""
    unit = math.gcd(8, x.shape[-1])
    return tuple(
        step // unit * unit if size == 1 else step
        for step, size in zip(x.stride()[:3], x.shape, strict=False)
    )


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
    """Return whether all programs own existing rows and all their segments have existing keys.

    For dkv, programs own keys and segments have rows.
    """
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
    "the strides of the tensors, in units": lambda c: all(
        tuple(c[f"{short}_{axis}"] * math.gcd(8, x.shape[-1]) for axis in "bhl") == _steps(x)
        for x, short in _strided(c)
    ),
    "addresses that are multiples of 16 bytes": lambda c: (
        isinstance(c["Q"], FakeTensor) or all(x.data_ptr() % 16 == 0 for x in tensors(c))
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


def _tables_of_mask(call: Call) -> list[Tensor]:
    return [x for x in call["mask"].as_tuple() if isinstance(x, Tensor)]


# FlexAttention: its kernels are compiled for the strides, and read as many keys as the tables of the mask name.
_FLEX: Rules = {
    "tensors on one device": lambda c: (
        {x.device for x in _tables_of_mask(c)} == {c["q"].device} and one_device(c)
    ),
    "four axes, none of them empty": lambda c: all(x.ndim == 4 and x.numel() for x in _each(c)),
    "one dtype": lambda c: len({x.dtype for x in _each(c)}) == 1,
    "dense tensors": lambda c: all(x.is_contiguous() for x in _each(c)),
    "k and v alike, of the batch of q": lambda c: (
        c["k"].shape[:3] == c["v"].shape[:3] and c["k"].shape[0] == c["q"].shape[0]
    ),
    "query heads divisible by key/value heads": lambda c: c["q"].shape[1] % c["k"].shape[1] == 0,
    "a mask of these lengths": lambda c: (
        c["mask"].shape[-2:] == (c["q"].shape[2], c["k"].shape[2])
        and c["mask"].kv_indices.shape[2:] == tuple(-(-c[name].shape[2] // 128) for name in "qk")
    ),
    "dense int32 tables": lambda c: all(
        x.dtype == torch.int32 and x.is_contiguous() for x in _tables_of_mask(c)
    ),
    "gradients of all three tensors, or of none": lambda c: len({x.requires_grad for x in _each(c)}) == 1,
}
_GRADIENTS: Rules = {
    "dense gradients of the shapes and dtype of q, k and v": lambda c: all(
        c[name].is_contiguous() and c[name].shape == c[name[1]].shape and c[name].dtype == c["q"].dtype
        for name in ("dq", "dk", "dv")
        if name in c
    ),
}
_FLASH_ATTN = _forward_rules(heads=2)
_CUDNN = _forward_rules(own_value_dims=True, shortest=2)


def _steps_taken(x: Tensor) -> list[int]:
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


# torch looks up cuDNN's plans by the strides of q, k and v only.
_ONE_LAYOUT: Rules = {
    "strides of dout and out that follow from those of q": lambda c: all(
        x.is_contiguous() if x.shape != c["q"].shape else _steps_taken(x) == _steps_taken(c["q"])
        for x in (c["dout"], c["out"])
    ),
}
RULES: dict[str, Rules] = {
    "flash_forward": _forward_rules(),
    "flash_backward": _forward_rules() | _backward_rules(),
    "flash_attn_forward": _FLASH_ATTN,
    "flash_attn_backward": _FLASH_ATTN
    | _GRADIENTS
    | _backward_rules(lambda q: (len(q), q.shape[2], q.shape[1])),
    "flash_attn_varlen_forward": _VARLEN,
    "flash_attn_varlen_backward": _VARLEN | _GRADIENTS | _backward_rules(lambda q: (q.shape[1], q.shape[0])),
    "flex": _FLEX,
    "cudnn_forward": _CUDNN,
    "cudnn_backward": _CUDNN | _backward_rules(lambda q: (*q.shape[:3], 1)) | _ONE_LAYOUT,
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
def as_on_a_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Make blocks of libraries treat CPU tensors as tensors on a GPU of this compute capability."""
    with (
        mock.patch.object(library, "on_cuda", lambda x: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        mock.patch.object(torch.backends.cudnn, "version", lambda: 91002),
    ):
        yield


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and a dense lse by torch's CPU operator, where v may have another head dim than q."""
    wide = max(q.shape[-1], v.shape[-1])
    padded = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*padded, 0.0, causal, scale=scale)
    return library.cut_to(out, v).contiguous(), lse.contiguous()


def _cpu_backward(call: Call, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Return dq, dk and dv by torch's CPU operator, where v may have another head dim than q."""
    tensors = [call[name] for name in _ROWS]
    wide = max(x.shape[-1] for x in tensors)
    padded = (F.pad(x, (0, wide - x.shape[-1])) for x in tensors)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *padded, _as_cuda_reads(call["lse"]), 0.0, causal, scale=scale
    )
    return tuple(library.cut_to(x, like).contiguous() for x, like in zip(found, tensors[1:4], strict=True))


@contextmanager
def cudnn_operators(tell: Told = check) -> Iterator[None]:
    """Run the cudnn block on CPU tensors, by stand-ins of torch's operators."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, attn_bias: None, compute_log_sumexp: bool, *, scale: float | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    ) -> Any:  # fmt: skip
        assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
        tell("cudnn_forward", {"q": q, "k": k, "v": v, "causal": is_causal})
        out, lse = _cpu_forward(q, k, v, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
        return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], None, None, None

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, philox_seed: Tensor,
        philox_offset: Tensor, attn_bias: None, cum_seq_q: None, cum_seq_k: None, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        assert (attn_bias, cum_seq_q, cum_seq_k, dropout_p) == (None, None, None, 0.0)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert philox_seed.dtype == philox_offset.dtype == torch.int64
        call = {"dout": dout, "q": q, "k": k, "v": v, "out": out}
        tell("cudnn_backward", call | {"lse": lse, "causal": is_causal})
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return _cpu_backward(call | {"lse": lse.squeeze(-1)}, is_causal, scale)

    operators = SimpleNamespace(
        _scaled_dot_product_cudnn_attention=forward, _scaled_dot_product_cudnn_attention_backward=backward
    )
    with mock.patch.object(cudnn, "_aten", operators), as_on_a_gpu():
        yield


class FlashAttn:
    """Stand-ins for the functions of flash-attn 2, 3 and 4, with the arguments of each."""

    def __init__(self, tell: Told) -> None:
        self.tell = tell

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, bounds: Call
    ) -> tuple[Tensor, Tensor]:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if not bounds:
            self.tell("flash_attn_forward", {"q": q, "k": k, "v": v, "causal": causal})
            out, lse = _cpu_forward(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
            return out.transpose(1, 2), lse
        self.tell("flash_attn_varlen_forward", {"q": q, "k": k, "v": v, "causal": causal} | bounds)
        # The kernel has no program for a row beyond the longest sequence, and writes nothing there.
        out, lse = (
            q.new_full((*q.shape[:2], v.shape[2]), math.nan),
            q.new_full((q.shape[1], len(q)), math.nan).float(),
        )
        for rows, keys in _sequences(q, bounds):
            part = _cpu_forward(
                *(x[None].transpose(1, 2) for x in (q[rows], k[keys], v[keys])), causal, scale
            )
            out[rows], lse[:, rows] = part[0][0].transpose(0, 1), part[1][0]
        return out, lse

    def _backward(self, causal: bool, scale: float | None, bounds: Call, **call: Tensor) -> None:
        scale = call["q"].shape[-1] ** -0.5 if scale is None else scale
        if not bounds:
            self.tell("flash_attn_backward", call | {"causal": causal})
            self._write(call, call["lse"], causal, scale)
            return
        self.tell("flash_attn_varlen_backward", call | {"causal": causal} | bounds)
        for name in ("dq", "dk", "dv"):
            call[name].fill_(math.nan)
        lse = _as_cuda_reads(call["lse"])
        for rows, keys in _sequences(call["q"], bounds):
            sequence = {name: call[name][None, rows] for name in ("dout", "q", "out", "dq")}
            sequence |= {name: call[name][None, keys] for name in ("k", "v", "dk", "dv")}
            self._write(sequence, lse[None, :, rows].contiguous(), causal, scale)

    def _write(self, call: Call, lse: Tensor, causal: bool, scale: float) -> None:
        """Write the gradients of tensors (B, L, H, D)."""
        heads_first = {name: call[name].transpose(1, 2) for name in _ROWS} | {"lse": lse}
        for name, found in zip(("dq", "dk", "dv"), _cpu_backward(heads_first, causal, scale), strict=True):
            call[name].copy_(found.transpose(1, 2))

    def forward_2(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: None, return_softmax: bool,
        **bounds: Any,
    ) -> Any:  # fmt: skip
        unused = dropout_p, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
        assert unused == (0.0, -1, -1, 0.0, None, False)
        return (
            *self._forward(q, k, v, causal, softmax_scale, bounds),
            q.new_empty(0),
            torch.zeros(2, dtype=torch.int64),
        )

    def varlen_forward_2(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: None = None, return_softmax: bool = False,
    ) -> Any:  # fmt: skip
        return self.forward_2(
            q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            return_softmax, **_bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        )  # fmt: skip

    def backward_2(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: None, deterministic: bool, rng_state: None = None,
        **bounds: Any,
    ) -> Any:  # fmt: skip
        unused = dropout_p, window_size_left, window_size_right, softcap, alibi_slopes, deterministic
        assert unused == (0.0, -1, -1, 0.0, None, False)
        self._backward(
            causal, softmax_scale, bounds, dout=dout, q=q, k=k, v=v, out=out, lse=softmax_lse, dq=dq, dk=dk, dv=dv
        )  # fmt: skip

    def varlen_backward_2(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
        softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
        alibi_slopes: None, deterministic: bool, rng_state: None = None,
    ) -> Any:  # fmt: skip
        self.backward_2(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, alibi_slopes, deterministic,
            **_bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        )  # fmt: skip

    def forward_3(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        softmax_scale: float | None = None, causal: bool = False,
    ) -> Any:  # fmt: skip
        bounds = _bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *self._forward(q, k, v, causal, softmax_scale, bounds), q.new_empty(0), q.new_empty(0)

    def backward_3(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float | None = None,
        is_causal: bool = False,
    ) -> Any:  # fmt: skip
        bounds = _bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        self._backward(
            is_causal, softmax_scale, bounds, dout=dout, q=q, k=k, v=v, out=out, lse=softmax_lse, dq=dq, dk=dk, dv=dv
        )  # fmt: skip

    def forward_4(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        softmax_scale: float | None = None, causal: bool = False, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        bounds = _bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = self._forward(q, k, v, causal, softmax_scale, bounds)
        return out, lse if return_lse else None, None, None

    def backward_4(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Any:  # fmt: skip
        bounds = _bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        self._backward(
            causal, softmax_scale, bounds, dout=dout, q=q, k=k, v=v, out=out, lse=lse, dq=dq, dk=dk, dv=dv
        )  # fmt: skip


def _bounds(*given: Any) -> Call:
    """Return the bounds of sequences by name, or nothing if the call has none of them."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    found = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    assert len(found) in (0, 4)
    return found


def _sequences(q: Tensor, bounds: Call) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and keys of each sequence that the kernel computes; fake tensors have no sequences."""
    if isinstance(q, FakeTensor):
        return
    ends = (pairwise(bounds[name].tolist()) for name in _BOUNDS)
    for (first, last), (begin, end) in zip(*ends, strict=True):
        rows, keys = min(last - first, bounds["max_seqlen_q"]), min(end - begin, bounds["max_seqlen_k"])
        if rows > 0 and keys > 0:
            yield slice(first, first + rows), slice(begin, begin + keys)


@contextmanager
def flash_attn_packages(
    *versions: int, tell: Told = check, capability: tuple[int, int] = (9, 0), of_2: str = "2.8.3"
) -> Iterator[None]:
    """Run the flash block on CPU tensors, with stand-ins for these versions of flash-attn and no other version.

    of_2: the full version of flash-attn 2.
    """
    functions = FlashAttn(tell)
    modules: dict[str, Any] = {block.module: None for block in flash.VERSIONS}
    for version in versions:
        names = (
            {"forward": "fwd", "backward": "bwd"}
            if version == 4
            else {"forward": "forward", "backward": "backward"}
        )
        names |= (
            {"varlen_forward": "varlen_forward", "varlen_backward": "varlen_backward"} if version == 2 else {}
        )
        module = ModuleType(f"flash-attn {version}")
        for which, name in names.items():
            setattr(module, f"_flash_attn_{name}", getattr(functions, f"{which}_{version}"))
        modules[
            {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface", 4: "flash_attn.cute.interface"}[
                version
            ]
        ] = module
    modules["flash_attn"] = ModuleType("flash_attn")
    modules["flash_attn"].__version__ = of_2
    kept = flash._loaded, flash._bounds  # no test may find the fake bounds of another
    for function in kept:
        function.cache_clear()
    try:
        with mock.patch.dict(sys.modules, modules), as_on_a_gpu(capability):
            yield
    finally:
        for function in kept:
            function.cache_clear()


@contextmanager
def flex_gradients() -> Iterator[None]:
    """Let FlexAttention differentiate on the CPU, where torch has its backward but refuses to run it."""
    with (
        mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None),
        mock.patch.object(flex, "has_backward", lambda q: True),
    ):
        yield


@contextmanager
def flex_calls(tell: Told = check) -> Iterator[None]:
    """Pass every call of FlexAttention to `tell`, then run the call on the CPU, with gradients."""
    compiled = flex._compiled

    def spied(*signature: Any) -> Callable[..., Any]:
        def call(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
            tell("flex", {"q": q, "k": k, "v": v, "mask": mask})
            return compiled(*signature)(q, k, v, mask)

        return call

    with flex_gradients(), mock.patch.object(flex, "_compiled", spied):
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
    """Replace `old` by `new` in the source of a function or method inside this context."""
    function = inspect.unwrap(getattr(owner, name))
    text = textwrap.dedent(inspect.getsource(function))
    assert old in text, f"{old!r} is not in {name}"
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + text.replace(old, new), function.__globals__, made)
    with mock.patch.object(owner, name, made[name]):
        yield
