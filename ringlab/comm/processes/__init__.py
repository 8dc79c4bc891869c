"""Ranks that are processes: launched here or by torchrun, over gloo, NCCL or symmetric memory."""
