"""Products of a decode step's few rows with a weight, and the hint what is read next."""
