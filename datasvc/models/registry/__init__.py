"""Registry of model versions: list, compare, retain, remove, verify and repair them."""
