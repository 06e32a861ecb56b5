"""Read access for people: SQL over a version, pages of samples, histograms, previews, bytes that versions share."""
