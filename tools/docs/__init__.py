"""The generated pages of docs/, which `python -m tools.docs` or `make docs` writes.

commands      docs/cli.md, from the commands themselves
names         docs/api.md, from the docstrings of the names that `from ringlab import …` gives
architecture  docs/architecture.md, from the table of floors and the modules' docstrings
benchmarks    docs/benchmarks.md, from benchmarks/results
drawings      the pictures of docs/guide, from layouts, masks, and the traces of runs
"""
