"""The search box: names and references, runs, keys of samples, and digests."""
