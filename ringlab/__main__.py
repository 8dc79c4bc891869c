"""`python -m ringlab …`, for torchrun: the same as the command `ringlab`."""

from ringlab.cli import main

if __name__ == "__main__":
    main()
