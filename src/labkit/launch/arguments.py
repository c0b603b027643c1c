"""Parse a lab's arguments once per job, before anything heavy is imported."""

import argparse
import contextlib
import os
import time


def explained_by(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a module, line by line."""
    as_written = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=as_written)


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """`parser.parse_args()` on every rank; only rank 0 prints help and errors."""
    if os.environ.get("RANK", "0") == "0":
        return parser.parse_args()
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            return parser.parse_args()
    except SystemExit as leave:
        if leave.code:
            # torchrun stops all ranks when one fails: let rank 0 fail first, with its message.
            time.sleep(30)
        raise


def positive(text: str) -> int:
    """An integer of at least 1; pass it as `type=` to `add_argument`."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no positive whole number in the digits 0 to 9"
        )
    return int(text)
