"""Ranks that are processes, started by `launch` or torchrun, and transports: gloo, NCCL, symmetric memory."""
