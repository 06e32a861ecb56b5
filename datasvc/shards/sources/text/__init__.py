"""Source of text: documents are tokenized and packed into blocks."""
