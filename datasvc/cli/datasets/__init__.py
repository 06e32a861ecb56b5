"""Commands for data sets: ingest, show, derive versions, export, verify, audit."""
