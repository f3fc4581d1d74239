"""Entry point of ``python -m ringattn`` and of the script ``ringattn``; the commands are in ``bench/cli.py``."""

import sys


def main() -> None:
    """Run the command line on ``sys.argv`` and exit."""
    try:  # the import is inside, so that Ctrl-C during the import prints no traceback
        from .bench.cli import app

        app(prog_name="ringattn")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
