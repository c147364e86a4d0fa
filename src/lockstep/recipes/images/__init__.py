"""Image data and image pictures that several recipes share."""
