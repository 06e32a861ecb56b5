"""Read access for people: SQL queries over a data-set version, previews of samples, and contact sheets."""
