"""Metrics that are exact over ranks: sums and counts, never means of means."""
