"""Ranks that are processes, which `launch` or torchrun starts, and the transports between them."""
