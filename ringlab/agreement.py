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
    if not torch.equal(letters, letter.expand_as(letters)):
        distances = [(comm.rank - rank) % comm.world_size for rank in range(comm.world_size)]
        texts = (bytes(letters[distance].cpu().numpy())[len(digest) :] for distance in distances)
        heard = [text.rstrip(b"\0").decode(errors="replace").replace("\n", "\n        ") for text in texts]
        raise AgreementError(
            f"the same call on all {comm.world_size} ranks",
            "\n        ".join(f"rank {rank}: {each}" for rank, each in enumerate(heard)),
            "no data was sent; mend the rank that differs",
        )


def _everyones(comm: Comm, letter: torch.Tensor) -> torch.Tensor:
    """Return all ranks' letters, row d that of rank − d, after log2(P) exchanges that double what a rank has.

    Source: Bruck et al. 1997, doi 10.1109/71.642949.
    """
    letters = letter.new_empty(comm.world_size, len(letter))
    letters[0] = letter
    have = 1
    while have < comm.world_size:
        count = min(have, comm.world_size - have)
        to, source = (comm.rank + have) % comm.world_size, (comm.rank - have) % comm.world_size
        more = letters[have : have + count]
        comm.exchange(
            send=(letters[:count],), to=to, receive=(more,), source=source, tag=CONTROL + "agree"
        ).wait()
        have += count
    return letters
