"""Agreement: before any data moves, all ranks compare descriptions of their next step.

If one rank is called with wrong or different arguments, every rank raises an error instead of waiting for
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from ringlab.comm.protocol import CONTROL, Comm
from ringlab.comm.ring import Ring
from ringlab.errors import (
    AgreementError,
    DeadlockError,
    MismatchError,
    PeerDiedError,
    TransportTimeout,
)
from ringlab.torch_modes import outside_transforms

_BYTES = 512
_SHOWN = 4
"""The largest number of different statements that an error quotes."""
_EVERYWHERE = "call this on every rank of the ring, equally often and in the same order: these ranks wait for the calls of others"
_REMEDY = "no data was sent; fix the call of the rank that differs"
_SAME_BATCH = (
    "give all ranks of a ring the same batch, and each ring another one: "
    "DistributedSampler(data, num_replicas=world_size // P, rank=global_rank // P), where P is ring.world_size"
)
T = TypeVar("T")


def agree(
    comm: Comm,
    description: str,
    error: Exception | None,
    remedy: str = _REMEDY,
) -> None:
    """Check that every rank passes the same `description` and no `error`. A rank's message has 512 bytes.

    remedy: the remedy in the AgreementError, if the caller knows why ranks may differ.
    Raises: `error` itself on a rank that passes one; AgreementError, which quotes every rank, on the other
    ranks.
    """
    if comm.world_size == 1:
        if error is not None:
            raise error
        return
    statement = f"error {type(error).__name__}: {error}" if error else description
    # The digest is of the whole text, because the message contains only the beginning of a long text.
    digest = hashlib.sha256(statement.encode()).digest()
    message = digest + statement.encode()[: _BYTES - len(digest)].ljust(_BYTES - len(digest), b"\0")
    # The message is on the CPU even if q, k and v are on a GPU. To read the answers from the GPU, a rank
    # would have to wait for all kernels that were launched before.
    own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    try:
        messages = _gather(comm, own, "agree")
    except (DeadlockError, MismatchError, PeerDiedError, TransportTimeout) as missed:
        if " raised " in missed.got:  # a rank failed elsewhere: it would have sent an error of its arguments
            raise
        raise type(missed)(missed.needed, missed.got, _EVERYWHERE) from missed
    if error is not None:
        raise error
    if not torch.equal(messages, own.expand_as(messages)):
        distances = [(comm.rank - rank) % comm.world_size for rank in range(comm.world_size)]
        texts = (bytes(messages[distance].cpu().numpy())[len(digest) :] for distance in distances)
        said = [text.rstrip(b"\0").decode(errors="replace") for text in texts]
        digests = [bytes(messages[distance, : len(digest)].cpu().numpy()) for distance in distances]
        raise AgreementError(
            f"the same call on all {comm.world_size} ranks",
            _quoted(list(zip(said, digests, strict=True))).replace("\n", "\n        "),
            _REMEDY if any(text.startswith("error ") for text in said) else remedy,
        )


def on_any_rank(comm: Comm, here: bool) -> bool:
    """Return, on every rank, whether `here` is true on any rank. A rank's message has one byte."""
    own = torch.tensor([here], dtype=torch.uint8, device="cpu")
    return here if comm.world_size == 1 else bool(_gather(comm, own, "any").any())


def _quoted(statements: list[tuple[str, bytes]]) -> str:
    """Return the different texts of the ranks, each once, and the words in which they differ.

    statements: the text and the digest of each rank.
    """
    ranks: dict[tuple[str, bytes], list[int]] = {}
    for rank, statement in enumerate(statements):
        ranks.setdefault(statement, []).append(rank)
    lines = [f"{_named(those)}: {text}" for (text, _), those in ranks.items()]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"… and {len(lines) - _SHOWN} others of other ranks"]
    described = [text.split() for text, _ in ranks if not text.startswith("error ")]
    common = set.intersection(*map(set, described)) if described else set()
    different = [" ".join(word for word in words if word not in common) for words in described[:_SHOWN]]
    if len(described) > 1 and common and all(different):
        lines.append(f"they differ in: {' | '.join(different)}")
    return "\n".join(lines)


def _named(ranks: list[int]) -> str:
    """Return "rank 3", or "ranks 0 to 2, 5" for several."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


@contextmanager
def errors_told(comm: Comm | None) -> Iterator[None]:
    """Send an exception raised inside this context to the other ranks, which would otherwise wait for this rank.

    comm: None if the ranks do not compare their calls.
    """
    try:
        yield
    except Exception as error:
        if comm is not None:
            with outside_transforms():
                agree(comm, "", error)
        raise


def compared_over(ring: Any, validate: bool) -> Comm | None:
    """Return the comm over which ranks compare their calls, or None if they do not. `ring` may be anything."""
    return ring.comm if validate and isinstance(ring, Ring) else None


def checked(comm: Comm | None, check: Callable[[], tuple[T, str]]) -> T:
    """Return the result of `check` once its description is the same on all ranks.

    check: returns (result, description), and must not communicate. comm: None if the ranks do not compare
    their calls.
    Raises: the error of `check`; AgreementError on all other ranks.
    """
    with errors_told(comm):
        found, description = check()
    if comm is not None:
        agree(comm, description, None)
    return found


def checked_over(ring: Any, check: Callable[[], tuple[T, str]], validate: bool) -> T:
    """Return the result of `check` as `checked` does, over the comm that `compared_over` returns."""
    return checked(compared_over(ring, validate), check)


def cut_alike(ring: Any, arrays: Mapping[str, Any], cut: Callable[[], T], validate: bool = True) -> T:
    """Return the result of `cut` once all ranks of the ring have the same whole arrays.

    The ranks compare one hash of each array, in messages of 512 bytes. Without this check, ranks that cut
    different batches would compute attention over a sequence that no rank has, without an error.
    Raises: the error of `cut`; AgreementError on all other ranks, and on all ranks if arrays differ.
    """
    if not (validate and isinstance(ring, Ring) and ring.world_size > 1):
        return cut()
    found, described, error = None, "", None
    try:
        found, described = cut(), " ".join(f"{name}={_hash(x)}" for name, x in arrays.items())
    except Exception as raised:
        error = raised
    agree(ring.comm, f"the whole batch: {described}", error, _SAME_BATCH)
    return found  # type: ignore[return-value]  # if `cut` failed, `agree` has raised


def _hash(x: Any) -> str:
    """Return one word with the dtype, the shape and a hash of the values of a tensor, array or list."""
    if isinstance(x, torch.Tensor):
        whole = x.detach().cpu().contiguous()
        values = whole.view(-1).view(torch.uint8).numpy() if x.numel() else np.empty(0)
    else:
        values = np.asarray(x)
    dtype = x.dtype if isinstance(x, torch.Tensor) else values.dtype
    shape = "×".join(map(str, np.shape(x)))
    return f"{dtype}({shape})#{hashlib.sha256(values.tobytes()).hexdigest()[:12]}"


def _gather(comm: Comm, own: torch.Tensor, tag: str) -> torch.Tensor:
    """Return the messages of all ranks after log2(P) exchanges. Row d is the message of rank − d.

    Source: Bruck et al. 1997, doi 10.1109/71.642949.
    """
    messages = own.new_empty(comm.world_size, len(own))
    messages[0] = own
    have = 1
    while have < comm.world_size:
        count = min(have, comm.world_size - have)
        to, source = (comm.rank + have) % comm.world_size, (comm.rank - have) % comm.world_size
        received = messages[have : have + count]
        comm.exchange(
            send=(messages[:count],), to=to, receive=(received,), source=source, tag=CONTROL + tag
        ).wait()
        have += count
    return messages
