"""Transports: ranks that send tensors to each other, as threads of one process, as processes, or on a clock alone."""
