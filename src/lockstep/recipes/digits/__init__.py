"""Handwritten digits: a small conv net with batch norm on scikit-learn's 1,797 real 8×8 images."""
