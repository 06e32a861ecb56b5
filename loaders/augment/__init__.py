"""Random crops, flips and colours of images: drawn as pure functions of the position, and applied."""
