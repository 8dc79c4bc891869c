"""A report: its findings, its first fault in words, the places of wrong values, and its output formats."""
