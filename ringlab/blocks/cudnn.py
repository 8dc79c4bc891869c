"""The block backend `cudnn`: cuDNN's attention, called through torch's own operators.

The operators return lse, and their backward takes the lse over all keys.

cuDNN builds an execution plan for every combination of shapes and strides, and torch keeps it. The first tile of a
new length therefore takes longer than the next ones. Layouts with few lengths of tiles, such as zig-zag without
documents, need few plans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringlab.blocks.library import BackwardTile, Capability, LibraryBlock

_aten = torch.ops.aten


class Cudnn(LibraryBlock):
    """Attention of cuDNN 9, for float16 and bfloat16 on GPUs from sm_80 on. The head dims of v and q may differ.

    The limits are those that torch checks before `scaled_dot_product_attention` chooses cuDNN. `Blockwise`
    computes tiles with one row or one key: cuDNN does not support one key, and on Blackwell some of its versions do
    not support one row. The backward of cuDNN does not give the same bits every time.
    Source: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and aten/src/ATen/native/cudnn/MHA.cpp.
    """

    name = "cudnn"
    own_value_dims = True
    shortest = 2

    def missing(self) -> str | None:
        version = torch.backends.cudnn.version()
        if version is None:
            return "needs cuDNN, which this build of torch does not have"
        return None if version >= 90000 else f"needs cuDNN 9.0 or later (90000), got {version}"

    def largest_head_dim(self, capability: Capability) -> int:
        # Some versions of torch and cuDNN support head dims up to 256 on Hopper, but later versions no
        # longer do.
        return 128 if (8, 0) <= capability <= (12, 1) else 0

    def _library_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal, scale=scale
        )
        return out, lse.reshape(q.shape[:-1])  # from (B, H, L, 1)

    def _library_backward(self, tile: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
        q, dout, out = _one_layout(tile.q, tile.dout, tile.out)
        # The operator requires a random state for dropout, which is not used here.
        unused = torch.zeros((), dtype=torch.int64, device=tile.q.device)
        # The schema calls attn_bias a tensor. torch turns None into an undefined tensor, which the operator expects.
        return _aten._scaled_dot_product_cudnn_attention_backward(
            dout,
            q,
            tile.k,
            tile.v,
            out,
            tile.lse.unsqueeze(-1),
            philox_seed=unused,
            philox_offset=unused,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=tile.q.shape[-2],
            max_k=tile.k.shape[-2],
            dropout_p=0.0,
            is_causal=tile.causal,
            scale=tile.scale,
        )


def _one_layout(q: Tensor, dout: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors, copied where necessary, so that the strides of q determine those of dout and out.

    torch looks up the plan of a backward by the strides of q, k and v only. If dout and out had other
    strides than those for which the plan was made, gradients would be silently wrong.
    """
    if q.shape != out.shape:
        return q, dout.contiguous(), out.contiguous()
    if q.stride() == dout.stride() == out.stride():
        return q, dout, out
    return q.contiguous(), dout.contiguous(), out.contiguous()
