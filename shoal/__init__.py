"""Shoal: an encode / prefill / decode serving cluster for DeepSeek-V4.1-Flash on Ray.

The parts live in top-level folders of the repository and import as `shoal.<folder>`. In a checkout
(or a Ray working directory) this package finds them beside itself; a wheel carries them inside.
"""

import os as _os

__version__ = "0.1.0"

_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if _os.path.isfile(_os.path.join(_root, "cluster", "cli.py")):  # a checkout, not an installed wheel
    __path__.append(_root)
