"""Views: which samples of a split are trained on, and how often, as shard tables that are derived from its table.

A view has the shards of its split and marks the samples that it leaves out as deleted. The digest of its table is its
identity, as for every split, so order, states, ledgers, caches and provenance need nothing else. A view is evaluated
once: its table, opened by digest, always has the same samples, even if the condition would now select others.
"""
