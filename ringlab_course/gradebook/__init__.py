"""A class's grades: submissions, workers, the stored results, and the pages.

collect    paths → submissions, whatever the folders hold
policy     deadlines and what lateness costs
versions   what a result depends on: the checks, the seed, the notebook
pool       grading on processes of this machine; `cluster`: on a Dask cluster
runner     a class into its book, again and again until nothing is missing
entry      the book's record of one learner in one exercise
schema     the tables, their versions, and how a file proves to be a gradebook
store      the book itself: one transaction per result, one writer at a time
export     CSV and JSON for other programs
readable   numbers, names and entries as safe text; `formulas`: their formulas as pictures
pages      the same as web pages, with its views, plots and templates
"""
