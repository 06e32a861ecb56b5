"""The driver of an elastic job in the launcher: host discovery, membership decisions, start of workers."""
