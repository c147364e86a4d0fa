"""A classifier that also knows what it does not know: a joint energy model, robust inside and outside its data."""
