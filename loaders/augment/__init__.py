"""Random crops, flips and colour changes of images, drawn as pure functions of the sample's position."""
