"""The evidence behind docs/conformance-matrix.md and docs/peers.md.

It shows which check finds which wrong ring, and what the suite finds about known packages.
"""
