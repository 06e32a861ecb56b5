"""Opens, compares and changes versions of data sets: delete, append, merge, diff, verify."""
