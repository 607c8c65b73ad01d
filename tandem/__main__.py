"""`python -m tandem`: the command, for launchers that start modules, such as torchrun."""

from tandem.cli import app

if __name__ == "__main__":
    app()
