"""What is recorded of samples: signals and batches of runs, and certificates of purges."""
