"""Ingestion: plan the shards of a source, build them in worker processes, and commit them as a version."""
