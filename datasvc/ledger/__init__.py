"""Record of the positions that each rank of a run served: its files, and the audit over all of them."""
