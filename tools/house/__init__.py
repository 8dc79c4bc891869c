"""What the project's tree contains; `python -m tools.house` or `make house` prints it.

The output has the sizes of the parts, and the names whose docstrings or annotations are incomplete.

docstrings  doctests, docstrings, `Raises:` and axis types of the reference package
"""
