"""What is written into the run folder, and how it is read back: the one contract between training and watching."""
