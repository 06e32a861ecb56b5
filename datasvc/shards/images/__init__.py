"""Images as they are stored: headers and EXIF orientation, checks that they decode, and re-encoding."""
