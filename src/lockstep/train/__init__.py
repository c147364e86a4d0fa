"""The training loop and what it trains: recipes and the trainer."""
