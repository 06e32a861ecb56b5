"""The file formats of a data set: shards, sample indexes and shard tables."""
