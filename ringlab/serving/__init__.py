"""Serving a long context: paged caches, prefill in chunks, and decode with heads spread over the ranks.

tables             the numbers of the pages in which each sequence's tokens are
paged_cache        the tensors of those pages; each rank has some tokens of each sequence
chunks             `prefill`: the next tokens of a prompt attend to the cached ones and to themselves
prefill_schedules  the two ways to prefill: K/V go around the ring, or queries go around it
decode             `decode_heads`: the last tokens of many sequences attend; the ranks share the query heads
owners             the two ways in which merged partials reach the ranks that own their heads
helix              tokens × heads as a grid of ranks, for attention between tensor-parallel layers
checks             one interface to both kinds of cache, and checks of queries against a cache
"""

from __future__ import annotations

from ringlab.serving.chunks import prefill
from ringlab.serving.decode import decode_heads
from ringlab.serving.helix import HelixGrid
from ringlab.serving.paged_cache import PagedCache

__all__ = ["HelixGrid", "PagedCache", "decode_heads", "prefill"]
