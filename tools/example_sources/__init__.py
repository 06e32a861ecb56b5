"""Small real examples of every source that `datasvc ingest` reads; `tools/make_sources.py` writes them.

Nothing here uses datasvc: what it reads must be what others write.
"""
