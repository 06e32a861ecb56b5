"""The training program: a loop on our loaders, optimizer and checkpoints, and what it is made of."""
