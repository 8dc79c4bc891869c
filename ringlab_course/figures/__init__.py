"""Pictures of the course itself: its lessons, its papers, its kill matrix."""
