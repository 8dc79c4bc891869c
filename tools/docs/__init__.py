"""The generated pages of docs/: `python -m tools.docs` writes them, or `make docs`.

commands      docs/cli.md, from the commands themselves
names         docs/api.md, from the docstrings of what `from ringlab import …` gives
architecture  docs/architecture.md, from the table of floors and the modules' docstrings
benchmarks    docs/benchmarks.md, from benchmarks/results
picture       docs/ring.svg, from the trace of a run
"""
