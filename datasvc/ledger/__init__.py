"""What the ranks of a run handed over, position by position: the files, and the proof over all of them."""
