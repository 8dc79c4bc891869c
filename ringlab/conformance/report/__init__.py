"""A report: its findings, the first fault in words, where values are wrong, and the report as text, JUnit's XML and HTML."""
