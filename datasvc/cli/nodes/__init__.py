"""Commands for the cache of a node and for its server."""
