"""What the log entry of a model version says: metadata, code, environment, data, signatures."""
