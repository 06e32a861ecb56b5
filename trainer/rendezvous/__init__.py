"""How the ranks of a job meet, and which of them are missing."""
