"""Serving a long context: paged caches of many sequences, prefill in chunks, and decode with heads spread over the ranks.

tables        which pages hold which tokens of which sequence; numbers only
paged_cache   the tensors of those pages, a part of each sequence on every rank
prefill       a chunk of a prompt attends to the cached prefix and to itself: K/V travel, or queries
decode_heads  a few new tokens of each sequence; a rank has a share of the query heads, and tokens of every sequence
owners        the two ways in which merged partials come to the ranks that own their heads
helix         tokens × heads as a grid of ranks, for attention between two tensor-parallel layers
"""

from __future__ import annotations

from ringlab.serving.decode_heads import decode_heads
from ringlab.serving.helix import HelixGrid
from ringlab.serving.paged_cache import PagedCache
from ringlab.serving.prefill import prefill

__all__ = ["HelixGrid", "PagedCache", "decode_heads", "prefill"]
