"""What a run learns: classification of images or the next token; and its evaluation."""
