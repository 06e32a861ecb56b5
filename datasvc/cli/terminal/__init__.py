"""How commands print: tables, progress bars, JSON, pictures."""
