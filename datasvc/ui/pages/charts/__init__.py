"""Charts of the pages: the curves of a run, and the histograms of a data set."""
