"""Sources of tables: Parquet, Arrow, CSV, JSON lines, Hugging Face `datasets`."""
