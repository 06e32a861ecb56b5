"""File formats of a data set: shards with their readers and writers, sample indexes, and shard tables."""
