"""The groups of settings of which `TrainConfig` consists: one module, class and section of `--help` per subject."""
