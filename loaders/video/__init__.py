"""`VideoLoader`, which serves batches of clips, and its parts."""
