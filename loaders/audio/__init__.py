"""`AudioLoader`, which serves batches of clips of sounds as waves or mel spectrograms, and its parts."""
