"""Transports, by which ranks exchange tensors. Ranks are threads, processes, or recorded programs."""
