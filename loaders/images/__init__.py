"""`ImageLoader`, which serves batches of decoded images, and its parts."""
