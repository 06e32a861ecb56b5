"""Data sets of MosaicML Streaming (MDS) as a source."""
