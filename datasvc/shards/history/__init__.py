"""What is done with whole versions: revert to an old one, rename the data set, repair it, delete what is damaged."""
