"""Programs for people who work on the project: set-up, web pages, generated documents, measurements."""
