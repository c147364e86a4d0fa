"""Built-in recipes, one folder each: a model, its data and a default YAML."""
