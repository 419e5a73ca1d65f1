"""Adds a product's parts to the residual stream and normalises it, in one kernel."""
