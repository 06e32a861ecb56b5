"""List, compare, retain, remove, verify and repair model versions."""
