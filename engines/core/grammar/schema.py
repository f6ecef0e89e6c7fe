"""Which part of a JSON schema no grammar would enforce, so that a promise of valid answers is not given lightly.

Source: what xgrammar 0.2.9 does with each keyword, tried one by one (the tests do it again). It never says so itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

DEPTH_MAX = 32  # of nested schemas; compiling takes time by its square (6 s at 400 levels, measured)
NOTES = frozenset({
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly",
    "$defs", "definitions",
})  # fmt: skip
# A schema with one of these is decided by it alone: what stands beside it is not looked at.
SOLE = ("$ref", "anyOf", "allOf", "enum", "const")
OF_TYPE = {
    "object": frozenset({
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties",
    }),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}  # fmt: skip
FORMATS = frozenset({"date", "time", "date-time", "email", "uuid", "ipv4", "uri", "hostname"})


class Unenforced(NamedTuple):
    """Where (a path such as `properties.a.multipleOf`, "" for the whole) and what to do about it."""

    path: str
    rule: str


def unenforced(schema: object) -> Unenforced | None:
    """The first keyword of a schema that a grammar would ignore; None if every answer would be valid."""
    return next(_faults(schema, "", 0), None)


def depth(value: object, limit: int = DEPTH_MAX * 4) -> int:
    """How deeply maps and lists are nested, counted to `limit`."""
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    else:
        return 0
    return 1 + max((depth(one, limit - 1) for one in inner), default=0) if limit else 0


def _faults(schema: object, path: str, level: int) -> Iterator[Unenforced]:
    if not isinstance(schema, Mapping):
        return  # true and false; anything else is refused by the compiler, which says why
    if level > DEPTH_MAX:
        yield Unenforced(path, f"is nested more than {DEPTH_MAX} levels deep; flatten it or use $ref")
        return
    sole = next((word for word in SOLE if word in schema), None)
    kinds = schema.get("type", "object" if "properties" in schema else ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    known = {sole, "type"} if sole in ("enum", "const") else {sole} if sole else {"type", *_words(kinds)}
    for word in schema:
        if word not in NOTES and word not in known:
            beside = f"beside {sole}" if sole else "of a schema with this type" if kinds else "without a type"
            yield Unenforced(_join(path, word), f"is not enforced {beside}; remove it")
    yield from _single(schema, path)
    for name, inner in _inner(schema, path):
        yield from _faults(inner, name, level + 1)


def _words(kinds: list[str]) -> frozenset[str]:
    return frozenset[str]().union(*(OF_TYPE.get(kind, frozenset()) for kind in kinds))


def _single(schema: Mapping[str, Any], path: str) -> Iterator[Unenforced]:
    """Keywords that are enforced in some cases only."""
    if len(schema.get("allOf", ())) > 1:
        yield Unenforced(_join(path, "allOf"), "is enforced with one entry only; merge its entries")
    if not str(schema.get("$ref", "#")).startswith("#"):
        yield Unenforced(_join(path, "$ref"), "must stay inside the schema and begin with #")
    pattern = schema.get("pattern")
    if pattern is not None and ("(?=" in pattern or "(?!" in pattern or "(?<" in pattern):
        yield Unenforced(_join(path, "pattern"), "has a look-around, which is not enforced; write it without")
    if "format" in schema and schema["format"] not in FORMATS:
        yield Unenforced(_join(path, "format"), f"must be one of {', '.join(sorted(FORMATS))}; remove it")
    for word in ("minLength", "maxLength"):
        if word in schema and ("pattern" in schema or "format" in schema):
            yield Unenforced(_join(path, word), "is not enforced beside pattern or format; put it into the pattern")
    for name in schema.get("required", ()):
        if name not in schema.get("properties", {}):
            yield Unenforced(_join(path, "required"), f"names {name!r}, which properties lacks; add it there")


def _inner(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, object]]:
    for word in ("properties", "patternProperties", "$defs", "definitions"):
        for name, inner in schema.get(word, {}).items() if isinstance(schema.get(word), Mapping) else ():
            yield _join(path, f"{word}.{name}"), inner
    for word in ("items", "additionalProperties"):
        if word in schema:
            yield _join(path, word), schema[word]
    for word in ("anyOf", "allOf", "prefixItems"):
        for index, inner in enumerate(schema.get(word, ())):
            yield _join(path, f"{word}[{index}]"), inner


def _join(path: str, word: str) -> str:
    return f"{path}.{word}" if path else word
