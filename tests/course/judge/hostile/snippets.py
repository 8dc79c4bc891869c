"""What several hostile submissions begin with."""

from __future__ import annotations

CHANNEL = """
import sys
def channel():
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if type(value).__name__ == "Channel":
                return value
        frame = frame.f_back
"""
"""Finds the worker's end of its socket on the stack."""
