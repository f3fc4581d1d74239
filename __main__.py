"""``python -m ringattn``, and the script ``ringattn``: the command line of ``bench/``."""

import sys


def main() -> None:
    """Run the command line on ``sys.argv``; does not return."""
    try:  # also while it is imported
        from .bench.cli import app

        app(prog_name="ringattn")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
