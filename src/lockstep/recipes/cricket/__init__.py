"""Cricket: a graph network that gives the chances of the next ball, from Cricsheet's ball-by-ball records."""
