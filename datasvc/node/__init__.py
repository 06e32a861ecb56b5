"""The process of a node, `datasvc serve`: serves its cache to peers, stages on request, says how it is."""
