"""What the store raises: only mistakes of its caller or of the machine's set-up; losses are returned values.

```
StoreError
├── ConfigError            a field of a StoreConfig breaks a rule (also ValueError)
├── ObjectError            an object, key or token list that cannot be stored or named (also ValueError)
├── TraceError             a line of a trace file that breaks a rule of its format (also ValueError)
├── PlacementError         the devices given cannot hold one stripe apart (also ValueError)
└── CodeLibraryError       no ISA-L library on this machine
```
Expected outcomes are values: `Erased`, `Refused`, `Miss` (kvstore/core/records.py).
"""


class StoreError(Exception):
    """Root of everything the store raises on purpose."""


class ConfigError(StoreError, ValueError):
    """A configuration field breaks a rule; the message names field, value, rule and remedy."""

    def __init__(self, field: str, value: object, rule: str, remedy: str) -> None:
        super().__init__(f"{field} = {value!r} {rule}; {remedy}")
        self.field = field
        self.value = value


class ObjectError(StoreError, ValueError):
    """A token list, key or object that cannot be named or stored; the message says which and why."""


class PlacementError(StoreError, ValueError):
    """A stripe cannot be spread over the devices given without putting two shards on one device."""


class CodeLibraryError(StoreError):
    """Neither a system ISA-L nor the one inside the pyeclib wheel could be loaded."""


class TraceError(StoreError, ValueError):
    """A trace file that cannot be read; the message names file, line, field and rule."""

    def __init__(self, file: object, line: int, field: str, rule: str) -> None:
        super().__init__(f"{file}:{line}: {field} {rule}")
        self.line = line
        self.field = field
