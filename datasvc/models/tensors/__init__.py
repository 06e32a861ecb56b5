"""How tensors become stored bytes: chunks, byte planes, deltas and the table that lists them."""
