"""`python -m jaxserve` is the `jaxserve` command."""

from jaxserve.entry.cli import main

if __name__ == "__main__":
    main()
