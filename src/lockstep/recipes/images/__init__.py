"""Images to train on: the user's own in a standard format, or the digits that come with scikit-learn."""
