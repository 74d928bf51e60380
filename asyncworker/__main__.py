"""`python -m asyncworker` is the command `asyncworker`."""

from asyncworker.cli import main

if __name__ == "__main__":
    main()
