"""Products of many rows with a weight."""
