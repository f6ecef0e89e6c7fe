"""Logging of an actor process: one line an event on stderr, which Ray keeps in the worker's log file."""

import logging
import os
import sys


def begin_logging(who: str) -> None:
    """Log from this process as `who`; the level is `$SHOAL_LOG_LEVEL`, else INFO. Calling it again changes nothing."""
    root = logging.getLogger("shoal")
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {who} %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(os.environ.get("SHOAL_LOG_LEVEL", "INFO").upper())
    root.propagate = False
