"""What people read about a run: facts, warnings and times in words, charts, and the report as one HTML document."""
