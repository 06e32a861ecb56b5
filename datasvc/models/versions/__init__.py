"""The log entry of a model version: metadata, code, environment, data use and signatures."""
