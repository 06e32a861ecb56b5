"""What values of every package share to be shown in a notebook: rows as Arrow tables and pandas frames, and plots."""
