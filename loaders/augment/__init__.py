"""Random crops, flips and colour changes of images, drawn as pure functions of seed, epoch and position."""
