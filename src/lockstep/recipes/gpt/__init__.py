"""Bytes of text: a small GPT on any text file, or on the manual pages that come with Python."""
