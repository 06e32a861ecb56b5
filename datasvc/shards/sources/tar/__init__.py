"""Sources in tars: WebDataset, and the tar reader itself."""
