"""Output of commands: tables, JSON, images."""
