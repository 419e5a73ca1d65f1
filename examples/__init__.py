"""Programs of `jaxserve.lang`. Run one with `python -m examples.chat [MODEL] [--url URL]`."""
