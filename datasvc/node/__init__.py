"""The process of a node, `datasvc serve`: serves its cache to peers, runs staging jobs, reports its status."""
