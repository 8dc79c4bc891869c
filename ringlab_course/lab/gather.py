"""Gather plain data from all ranks on all ranks, as JSON over the transport that the lab measures."""

from __future__ import annotations

import json
from typing import Any

import torch

from ringlab.comm.protocol import CONTROL, Comm


def gather(comm: Comm, value: Any, device: torch.device | str = "cpu") -> list[Any]:
    """Return every rank's `value`, plain data, in rank order."""
    said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    count = torch.tensor([len(said)], device=device)
    lengths = [int(each) for each in comm.all_gather(count, tag=CONTROL + "lengths")]
    heard = comm.all_gather(said, [(length,) for length in lengths], tag=CONTROL + "said")
    return [json.loads(bytes(each.cpu().numpy()).decode()) for each in heard]
