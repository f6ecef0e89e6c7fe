"""From YAML text to typed values: YAML 1.2 words, no duplicate keys, and messages that name path, value and remedy."""

import difflib
import re
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import yaml
from shoal.cluster.errors import ManifestError, Problem
from shoal.cluster.quantities import Duration, Size

T = TypeVar("T")
_PATH = re.compile(r"^(?P<text>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<key>.*)`")
_EXPECTED = re.compile(r"Expected `(?P<want>.*?)`, got `(?P<got>.*?)`")
_WORDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "object": "a mapping",
    "null": "null", "array": "a list",
}  # fmt: skip


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: only true and false are booleans (`off` is a word), and a key stands once."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("bool", "timestamp", "int")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    loader.flatten_mapping(node)
    found: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
        if key in found:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
        found[key] = loader.construct_object(value_node, deep=True)
    return found


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def read_yaml(text: str, file: str) -> Mapping[str, object]:
    """The mapping in `text`; a ManifestError with line and column if it is not one."""
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "text"
        raise ManifestError(
            file, (Problem(where, _line(text, mark), f"is not YAML we read: {error.problem}", "correct it"),)
        ) from None
    except yaml.YAMLError as error:
        raise ManifestError(
            file, (Problem("text", "(unreadable)", f"is not YAML: {error}", "save it as UTF-8"),)
        ) from None
    if not isinstance(tree, dict):
        rule = "must be a mapping with kind and name"
        raise ManifestError(file, (Problem("the document", type(tree).__name__, rule, "see manifests/local.yaml"),))
    return tree


def _line(text: str, mark: Any) -> str:
    lines = text.splitlines()
    return lines[mark.line].strip() if mark and mark.line < len(lines) else "(end of file)"


def convert(tree: Mapping[str, object], kind: type[T], file: str) -> T:
    """`tree` as a `kind`; a ManifestError names the first place that does not fit."""
    try:
        return msgspec.convert(tree, kind, strict=True, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ManifestError(file, (_explain(str(error), tree, kind),)) from None


def _decode(kind: type, value: object) -> object:
    if kind is Duration or kind is Size:
        return kind.parse(value)
    raise NotImplementedError(f"manifest type {kind} has no decoder")


def value_at(tree: object, path: str) -> object:
    """The value at `a.b[0]` in a decoded YAML tree; None where nothing stands."""
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(tree, Mapping):
            tree = tree.get(part)
        elif isinstance(tree, list | tuple) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def _explain(message: str, tree: Mapping[str, object], kind: type) -> Problem:
    """msgspec's message as a Problem: it names place and rule; value and remedy are ours."""
    parts = _PATH.match(message)
    assert parts is not None
    path = (parts["path"] or "$").removeprefix("$").removeprefix(".")
    text = parts["text"]
    if found := _UNKNOWN.match(text):
        full = f"{path}.{found['key']}" if path else found["key"]
        known = sorted(get_type_hints(_kind_at(kind, path)))
        near = difflib.get_close_matches(found["key"], known, 1)
        remedy = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return Problem(full, value_at(tree, full), "is not a known key", remedy)
    if found := _MISSING.match(text):
        full = f"{path}.{found['key']}" if path else found["key"]
        return Problem(full, None, "must be given", f"add {found['key']} under {path or 'the document'}")
    value = value_at(tree, path)
    if found := _EXPECTED.match(text):
        want = " or ".join(_WORDS.get(word, word) for word in found["want"].split(" | "))
        return Problem(path, value, f"must be {want}, not {_WORDS.get(found['got'], found['got'])}", "correct the type")
    if text.startswith("Invalid enum value"):
        return Problem(path, value, f"must be one of {_choices(kind, path)}", "choose one of them")
    return Problem(path, value, text, "correct the value")


def _hint_at(kind: type, path: str) -> Any:
    """The declared type at a path of the manifest's types."""
    hint: Any = kind
    for part in re.findall(r"[^.\[\]]+", path):
        structs = [
            arm for arm in (get_args(hint) or (hint,)) if isinstance(arm, type) and issubclass(arm, msgspec.Struct)
        ]
        if not structs:
            return hint
        hint = get_type_hints(structs[0]).get(part)
    return hint


def _kind_at(kind: type, path: str) -> type:
    """The Struct at a path."""
    hint = _hint_at(kind, path)
    return next(a for a in (get_args(hint) or (hint,)) if isinstance(a, type) and issubclass(a, msgspec.Struct))


def _choices(kind: type, path: str) -> str:
    """The words a field accepts."""
    words: list[str] = []
    pending = [_hint_at(kind, path)]
    while pending:
        hint = pending.pop(0)
        for arm in get_args(hint):
            if isinstance(arm, str):
                words.append(arm)
            else:
                pending.append(arm)
    return ", ".join(words)
