"""Groups of commands that have a room of their own; `cli` mounts them."""
