"""The course as static web pages that load nothing from elsewhere: `python -m tools.website` or `make site`.

stage            the sources of all pages, made from the checkout and never committed
notebooks        lessons with their recorded outputs, exercises as skeletons
front            the first page: what the course is, and its map
moving_ring      the picture on the first page, from the trace of a run
misconceptions   every mistake that the checks know by name
kill_matrix      which check finds which wrong answer, and why there are checks that find none alone
api, docstrings  the reference, read from the package's source without importing the package
conf             settings of Sphinx
search           data for the ranking of search results, for search_scorer.js
links            checks every link and anchor of the built pages, and everything that they would load
"""
