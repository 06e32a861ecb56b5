"""The transfers of a node: sends and fetches objects, runs staging jobs, limits bandwidth."""
