"""Turns a source into shards and commits them as the next version of a data set."""
