"""The diptych command as tests give it."""

from parity.cli.main import main


def diptych(command: str, *more: object) -> int:
    """Exit status of a command line; what stands in ``more`` may hold blanks."""
    return main([*command.split(), *map(str, more)])
