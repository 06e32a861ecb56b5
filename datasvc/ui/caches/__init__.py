"""What pages have read or rendered, kept in memory for all readers of one server; each is bounded."""
