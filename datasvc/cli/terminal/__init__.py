"""Output of commands: tables, progress bars, JSON, images."""
