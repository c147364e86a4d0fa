"""Handwritten digits: a small conv net on scikit-learn's 1,797 real 8×8 images, or on the user's own."""
