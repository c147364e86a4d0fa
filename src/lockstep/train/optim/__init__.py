"""After the gradient: precision, clipping, optimizer, learning-rate schedule and EMA."""
