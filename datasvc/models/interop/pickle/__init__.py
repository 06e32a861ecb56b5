"""Read pickles of other programs without executing any code in them."""
