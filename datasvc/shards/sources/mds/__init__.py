"""Source of data sets of MosaicML Streaming (MDS)."""
