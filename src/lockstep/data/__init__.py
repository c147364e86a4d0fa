"""Data loading: the order of samples, global batches and lanes, workers, and prefetching to the device."""
