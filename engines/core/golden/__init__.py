"""Replays recorded scenarios of the engine runtime against this core: `python -m shoal.engines.core.golden FILE…`."""
