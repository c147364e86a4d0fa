"""Image data sets and pictures of images, shared by several recipes."""
