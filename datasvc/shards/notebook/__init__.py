"""How samples, splits, versions and logs of data sets look in a notebook, and their columns as Arrow tables."""
