"""A class's grades: which submissions there are, who grades them, what is kept, and who may read it how.

printable  names of files as text that is safe to keep and to print
entry      what the book holds of one learner in one exercise
rows       rows of the file, believed only where they are as we write them
schema     the tables, their versions, and how a file proves to be a gradebook
store      the book itself: one transaction per result
policy     deadlines and what lateness costs
walk       notebooks below a folder
submission_path  whose a path is, and of which exercise
digest     what identifies a notebook
collect    paths → submissions, whatever the folders hold
versions   what a result depends on: the checks and the seed
work       grading one notebook
pool       processes of this machine; `cluster`: a Dask cluster
runner     a class into its book, again and again until nothing is missing
lock       one run at a time
export     CSV and JSON for other programs; `explain`: an entry told to people
pages      the same as web pages, with its views, plots and templates
"""
