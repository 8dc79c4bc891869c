"""`python -m ringlab …`, which does the same as the command `ringlab` and can be started by torchrun."""

from ringlab.cli import main

if __name__ == "__main__":
    main()
