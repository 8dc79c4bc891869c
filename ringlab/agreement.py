"""Are all ranks called alike? Answered before any data moves, so that a wrong call hangs nobody."""

from __future__ import annotations

import hashlib

import torch

from ringlab.comm.protocol import CONTROL, Comm
from ringlab.errors import AgreementError

_BYTES = 512


def agree(comm: Comm, description: str, error: Exception | None, device: torch.device | str = "cpu") -> None:
    """Return if every rank gives the same `description` and no `error`; costs 512 bytes a rank.

    Raises: `error` itself on a rank that has one; AgreementError, naming who differs, on the others.
    """
    said = f"error {type(error).__name__}: {error}" if error else description
    digest = hashlib.sha256(said.encode()).digest()  # of all of it, for the text may be cut
    raw = digest + said.encode()[: _BYTES - len(digest)].ljust(_BYTES - len(digest), b"\0")
    letter = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
    letters = _everyones(comm, letter)
    if error is not None:
        raise error
    if any(not torch.equal(each, letter) for each in letters):
        texts = (bytes(each.cpu().numpy())[len(digest) :] for each in letters)
        heard = [text.rstrip(b"\0").decode(errors="replace") for text in texts]
        raise AgreementError(
            f"the same call on all {comm.world_size} ranks",
            "\n        ".join(f"rank {rank}: {each}" for rank, each in enumerate(heard)),
            "no data was sent; mend the rank that differs",
        )


def _everyones(comm: Comm, letter: torch.Tensor) -> list[torch.Tensor]:
    """Return all ranks' letters in rank order, after log2(P) exchanges that double what a rank has.

    Source: Bruck et al. 1997, doi 10.1109/71.642949.
    """
    have = letter.unsqueeze(0)  # row d is the letter of rank − d
    while (distance := len(have)) < comm.world_size:
        count = min(distance, comm.world_size - distance)
        to, source = (comm.rank + distance) % comm.world_size, (comm.rank - distance) % comm.world_size
        more = torch.empty_like(have[:count])
        send = have[:count].contiguous()
        comm.exchange(send=(send,), to=to, receive=(more,), source=source, tag=CONTROL + "agree").wait()
        have = torch.cat([have, more])
    return [have[(comm.rank - rank) % comm.world_size] for rank in range(comm.world_size)]
