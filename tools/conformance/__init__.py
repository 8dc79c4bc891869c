"""The evidence behind docs/conformance-matrix.md and docs/peers.md: which check finds which wrong ring, and known packages."""
