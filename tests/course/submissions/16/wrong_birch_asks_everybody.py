# expects: check=16.birch:cost misconception=asks_everybody
import torch

from ringlab.course.clinic.bedside import attend, nothing_seen


def birch(ring, q, k, v, positions, causal=True):
    """Every rank fetches all keys and values, and attends once."""
    shapes = [(*k.shape[:-2], len(own), k.shape[-1]) for own in positions]
    whole_k, whole_v = (torch.cat(ring.all_gather(x, shapes), dim=-2) for x in (k, v))
    places = torch.cat(positions)
    visible = (positions[ring.rank][:, None] >= places[None, :]) | (not causal)
    out, lse = attend(q, whole_k, whole_v, visible, *nothing_seen(q))
    return out.to(q.dtype), lse


def chart(patient):
    return {"fault": "lost sum", "check": "forward", "case": {"ranks": 3, "tokens": 1}, "matters": []}
