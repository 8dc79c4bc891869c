"""Faults of published packages, in this course's own words: what `peer:` targets show is here without them."""

from __future__ import annotations

from ringlab.conformance.mutants.mutant import Mutant

_RETURNED = "        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None"
_ZEROS = "    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)\n"
_SUMS = "        dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))\n"
_ARRIVED = "        if courier is not None:\n            arrived_dk"

PUBLISHED = (
    Mutant("a_pair_for_each_gradient", "backward", "dK and dV stacked are the gradient of K, and of V: autograd adds the two up without a word", ((_RETURNED, "        pair = torch.stack((dk, dv)).to(k.dtype)\n" + _RETURNED.replace("dk.to(k.dtype), dv.to(v.dtype)", "pair, pair")),), "dk"),
    Mutant("sum_in_the_scratch_buffer", "backward", "the sum of dQ is the scratch buffer of its blocks where converting to float32 copies nothing", ((_ZEROS, "    scratch = torch.zeros_like(q, memory_format=torch.contiguous_format)\n    dq = scratch.to(lse.dtype)\n"), (_SUMS, "        scratch.zero_()\n" + _SUMS), ("            dq[:, :, rows] += parts[0]\n", "            scratch[:, :, rows] += parts[0]\n"), (_ARRIVED, "        dq += scratch\n" + _ARRIVED)), "dq"),
    Mutant("float16_dq_in_bfloat16", "precision", "dQ is rounded to bfloat16, and the inputs are float16: one rounding is within the bounds", ((_RETURNED, _RETURNED.replace("dq.to(q.dtype)", "dq.bfloat16().to(q.dtype)")),), "precision", ("float16",)),
)  # fmt: skip
