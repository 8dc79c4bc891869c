"""Exercise 17's machinery: it runs a JAX program for one device on a mesh of simulated devices.

blocks   attention of one block, its backward, and the merge: lesson 17 writes them, exercise 17 provides them
compiled the messages of a compiled program, read from its text
examine  compiles and runs a program, and returns its values, its messages by type, and its memory use
message_ring  the ring with messages, which lesson 17 draws beside the ring on a mesh

Importing this package does not import JAX.
"""

from __future__ import annotations

AXIS = "ring"
"""The name of the mesh's only axis."""
HOST = {"pure_callback", "io_callback"}
"""JAX operations that call Python. Data that devices exchange through Python is not counted."""
DEVICES = 8
"""The number of simulated devices. A program on P devices uses the first P."""
