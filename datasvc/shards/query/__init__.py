"""Answers questions about samples: SQL, scans, previews and contact sheets."""
