"""Transports, by which ranks send tensors to each other: as threads, as processes, or in a recording."""
