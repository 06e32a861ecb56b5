"""`datasvc plan layouts`: the command line, and the costs of the models of the registry, for `datasvc.planning`."""
