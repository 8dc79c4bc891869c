"""Paired timings: ratios of two ways to do the same work, interleaved in one run."""
