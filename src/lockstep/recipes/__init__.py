"""The built-in recipes, one folder each, and the modules that find and run them."""
