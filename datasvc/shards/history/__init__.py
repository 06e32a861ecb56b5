"""What is done with whole versions: revert to an old one, and rename the data set."""
