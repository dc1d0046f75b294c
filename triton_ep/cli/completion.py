"""Print a script that makes a shell complete triton-ep's commands and options. Needs the package argcomplete."""

import argparse
import importlib.util

from triton_ep.errors import ConfigError

EXAMPLES = ('eval "$(triton-ep completion bash)"',)
_SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `triton-ep completion`."""
    parser.add_argument("shell", choices=_SHELLS, help="your shell; put the example's line into its start-up file")


def run(arguments: argparse.Namespace) -> int:
    """Print the script. Returns 0.

    Raises:
        ConfigError: argcomplete is not installed.
    """
    if importlib.util.find_spec("argcomplete") is None:
        raise ConfigError("completion needs the package argcomplete: pip install 'triton-ep[completion]'.")
    import argcomplete

    print(argcomplete.shellcode(["triton-ep"], shell=arguments.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell's completion request and exit. Do nothing otherwise, or without argcomplete."""
    if importlib.util.find_spec("argcomplete") is not None:
        import argcomplete

        argcomplete.autocomplete(parser)
