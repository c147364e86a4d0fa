"""A variational auto-encoder of images: it learns to compress them into a few numbers, and to draw new ones."""
