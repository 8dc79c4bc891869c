"""What the project's tree holds: `python -m tools.house` prints its sizes, and the names whose docstrings lack something, or `make house`.

docstrings  doctests, docstrings, `Raises:` and axis types of the reference package
"""
