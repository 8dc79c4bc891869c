"""Exercise 17's machinery: a program of one device, written in JAX, on a mesh of simulated devices.

blocks   attention of one block, its backward, and the merge: given, as lesson 17 wrote them
compiled the messages of a compiled program, read off its text
examine  such a program compiled and run: its values, messages by type, and memory

Importing this package imports no JAX.
"""

from __future__ import annotations

AXIS = "ring"
"""The name of the mesh's axis."""
HOST = {"pure_callback", "io_callback"}
"""JAX's operations that call Python: data that devices exchange through them is not counted."""
DEVICES = 8
"""Simulated devices; a program on P of them uses the first P."""
