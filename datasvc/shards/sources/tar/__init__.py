"""Sources of tars: WebDataset, and the streaming tar reader."""
