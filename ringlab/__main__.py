"""Makes `python -m ringlab …` do the same as the command `ringlab`, so that torchrun can start it."""

from ringlab.cli import main

if __name__ == "__main__":
    main()
