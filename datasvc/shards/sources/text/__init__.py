"""Text as a source: documents become packed blocks of tokens."""
