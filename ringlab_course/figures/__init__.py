"""Pictures for the lessons, and pictures of the course itself: its lessons, papers and kill matrix."""
