"""Ranks that are processes, started by `launch` or torchrun, over gloo, NCCL or symmetric memory."""
