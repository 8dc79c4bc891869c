"""A block that knows no soft caps and no dropout, as somebody's own may be."""

from __future__ import annotations

from ringlab.blocks.native import Native


class Plain(Native):
    name = "plain"
    supported_rules: frozenset[str] = frozenset()
