"""Reads pickles of others without executing anything in them."""
