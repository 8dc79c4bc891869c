"""The exercises, a folder each: its notebook with the solution, its checks, hints and misconceptions, its answers."""
