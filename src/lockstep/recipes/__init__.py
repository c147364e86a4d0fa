"""The built-in recipes, one folder each, and what finds and runs them."""
