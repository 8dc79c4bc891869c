"""The sizes of the project's parts, and gaps in its docstrings: `python -m tools.house` or `make house`.

The output has the sizes of the parts, and the names whose docstrings or annotations are incomplete.

docstrings  doctests, docstrings, `Raises:` and axis types of the reference package
"""
