"""Fuzzing of what reads bytes that others made: the judge's protocol and the notebooks handed in."""
