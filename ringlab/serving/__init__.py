"""Serving a long context: paged caches of many sequences, prefill in chunks, and decode with heads spread over the ranks.

tables             which pages hold which tokens of which sequence; numbers only
paged_cache        the tensors of those pages, some tokens of each sequence on every rank
chunks             `prefill`: the next tokens of a prompt attend to the cached ones and to themselves
prefill_schedules  the two ways to bring them together: K/V go around the ring, or queries do
decode             `decode_heads`: the last tokens of many sequences, with query heads shared among the ranks
owners             the two ways in which merged partials reach the ranks that own their heads
helix              tokens × heads as a grid of ranks, for attention between tensor-parallel layers
checks             both kinds of cache seen alike, and checks of queries against them
"""

from __future__ import annotations

from ringlab.serving.chunks import prefill
from ringlab.serving.decode import decode_heads
from ringlab.serving.helix import HelixGrid
from ringlab.serving.paged_cache import PagedCache

__all__ = ["HelixGrid", "PagedCache", "decode_heads", "prefill"]
