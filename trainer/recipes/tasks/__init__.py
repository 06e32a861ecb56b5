"""The tasks of the training program, classification of images and language modelling, and their evaluation."""
