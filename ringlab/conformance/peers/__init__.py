"""Published packages of ring attention as targets, such as `ringlab check peer:ring-attention-pytorch`.

PEERS has the names. The packages are optional: `pip install -c requirements.lock -e '.[peers]'`. Their code
runs in child processes and is trusted as much as the code of any target.
"""

from __future__ import annotations

from ringlab.conformance.peers import (
    ring_attention_pytorch,
    ring_flash_attn,
    torch_context_parallel,
    yunchang,
)
from ringlab.conformance.peers.peer import STAND_IN, Peer
from ringlab.conformance.target.claims import Target
from ringlab.errors import BackendError

_TORCH_KERNEL = "torch's flash operator for CPUs"
_RFA, _YC = ("ring-flash-attn", "0.1.8"), ("yunchang", "0.6.4")

_TABLE = (
    Peer("ring-attention-pytorch", "ring-attention-pytorch", "0.5.20", ring_attention_pytorch.make),
    Peer("ring-flash-attn", *_RFA, ring_flash_attn.contiguous, STAND_IN),
    Peer("ring-flash-attn-zigzag", *_RFA, ring_flash_attn.zigzag, STAND_IN),
    Peer("ring-flash-attn-stripe", *_RFA, ring_flash_attn.stripe, STAND_IN),
    Peer("ring-flash-attn-kvpacked", *_RFA, ring_flash_attn.kvpacked, STAND_IN),
    Peer("ring-flash-attn-qkvpacked", *_RFA, ring_flash_attn.qkvpacked, STAND_IN),
    Peer("ring-flash-attn-varlen", *_RFA, ring_flash_attn.varlen, STAND_IN),
    Peer("ring-flash-attn-llama3", *_RFA, ring_flash_attn.llama3, STAND_IN),
    Peer("yunchang", *_YC, yunchang.contiguous, STAND_IN),
    Peer("yunchang-zigzag", *_YC, yunchang.zigzag, STAND_IN),
    Peer("yunchang-stripe", *_YC, yunchang.stripe, STAND_IN),
    Peer("yunchang-hybrid", *_YC, yunchang.hybrid, STAND_IN),
    Peer("torch-context-parallel", "torch", "", torch_context_parallel.make, _TORCH_KERNEL),
    Peer(
        "torch-context-parallel-public", "torch", "", torch_context_parallel.public,
        without=torch_context_parallel.without_gpu,
    ),
)  # fmt: skip
PEERS: dict[str, Peer] = {peer.name: peer for peer in _TABLE}


def peer(name: str) -> Peer:
    """Return the peer called `name`. Raises: BackendError for an unknown name."""
    if name not in PEERS:
        raise BackendError(f"one of the peers {', '.join(PEERS)}", repr(name))
    return PEERS[name]


def target(name: str) -> Target:
    """Return the peer called `name` as a target. Raises: BackendError if it is unknown or unavailable.

    >>> target("torch-context-parallel").over
    'torch.distributed'
    """
    return peer(name).target()
