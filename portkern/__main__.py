"""``python -m portkern`` and the script ``portkern``."""

from __future__ import annotations

from portkern.cli.main import portkern


def main() -> None:
    """Run the command line of this process; exits with its code."""
    portkern.main()


if __name__ == "__main__":
    main()
