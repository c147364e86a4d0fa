"""Code that several commands share: launch options, trial runs, and files written for the user."""
