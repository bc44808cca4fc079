"""`python -m onchip`: the command line."""

from onchip.cli import main

if __name__ == "__main__":
    main()
