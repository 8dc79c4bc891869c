"""Measurements of the project's own tree: `python -m tools.house` prints them as a table, or `make house`.

floors      which module stands on which floor
imports     every import between modules: those that point up, and circles
docstrings  doctests, docstrings, `Raises:` and axis types of the reference package
figures     everything else that the table shows
"""
