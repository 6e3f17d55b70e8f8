"""`python -m grapnet` is the command line."""

from .cli._main import main

if __name__ == "__main__":
    raise SystemExit(main())
