"""Residual networks that classify images: ResNet-50 and its kin, and those for images of CIFAR's size."""
