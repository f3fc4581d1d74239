"""``python -m ringattn``: the command line of ``bench/``."""

from .bench.cli import main

if __name__ == "__main__":
    main()
