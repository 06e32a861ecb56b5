"""The engine of a rank: it agrees with the other ranks on the operations to run, by name, and runs them.

`negotiation/` decides which operations run, and in which order; it does no input or output. `execution/` runs these
operations over torch.distributed. `engine` is the background thread that connects the two.
"""
