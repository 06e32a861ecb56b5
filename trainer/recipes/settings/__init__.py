"""The settings of a run: configuration, command line, presets."""
