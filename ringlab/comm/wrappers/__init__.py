"""Wrappers of a transport: traced, faulty, strict. Each adds one behaviour and passes on all other calls."""
