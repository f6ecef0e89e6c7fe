"""Strict decoding of published `config.json` objects into frozen dataclasses: every key is known or refused by name."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from shoal.engines.model.errors import ConfigError

Value = TypeVar("Value")

# Keys that Hugging Face writes into any configuration and that say nothing about the computation.
HARMLESS_KEYS = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "chunk_size_feed_forward", "dtype", "id2label",
        "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
        "torch_dtype", "transformers_version", "use_cache", "initializer_range", "attention_dropout",
    }
)  # fmt: skip


def decode(kind: type[Value], raw: object, path: str, fixed: Mapping[str, object], nested: frozenset[str]) -> Value:
    """A `kind` from the JSON object `raw`; `path` names it in errors.

    `fixed` are keys that carry no freedom: absent or exactly the given value. Keys in `nested` are left to the
    caller (they must be present as already decoded values in `raw`). Raises ConfigError.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(path, raw, "must be an object", "use the published layout of config.json")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, value in raw.items():
        where = f"{path}.{key}" if path else key
        if key in fixed:
            if value != fixed[key] or isinstance(value, bool) != isinstance(fixed[key], bool):
                raise ConfigError(where, value, f"only {fixed[key]!r} is defined", f"set it to {fixed[key]!r}")
        elif key not in fields and key not in HARMLESS_KEYS:
            raise ConfigError(where, value, "is not a key of this architecture", "remove it or correct its name")
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        where = f"{path}.{name}" if path else name
        if name in raw:
            values[name] = raw[name] if name in nested else scalar(raw[name], hints[name], where)
        elif field.default is dataclasses.MISSING:
            raise ConfigError(where, None, "is required", "add the key with the checkpoint's value")
    return kind(**values)


def scalar(value: object, kind: object, where: str) -> object:
    """`value` as `kind` (int, float, str, bool, tuple of int, or one of them or None); raises ConfigError."""
    if isinstance(kind, types.UnionType):
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        return None if value is None else scalar(value, inner[0], where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(where, value, "must be a list of integers", "use the published layout of config.json")
        return tuple(scalar(v, int, f"{where}[{i}]") for i, v in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    assert isinstance(kind, type), f"{where}: unsupported annotation {kind!r}"
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(where, value, f"must be {kind.__name__}", "correct the value's type")
    return value
