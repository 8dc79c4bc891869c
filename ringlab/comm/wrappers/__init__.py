"""Wrappers of a transport: traced, faulty, strict. Each adds one thing and passes on the rest."""
