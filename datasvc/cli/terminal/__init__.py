"""Arguments and output that many commands share: tables, JSON, images."""
