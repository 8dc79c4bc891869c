"""Benchmarks: two ways to do the same work run alternately, and the ratio of their times is reported."""
