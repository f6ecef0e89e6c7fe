from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_GRAIN: _ClassVar[Kind]
    KIND_ANCHOR: _ClassVar[Kind]

class Traffic(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAFFIC_DEFAULT: _ClassVar[Traffic]
    TRAFFIC_AGENT: _ClassVar[Traffic]
    TRAFFIC_CHAT: _ClassVar[Traffic]
KIND_UNSPECIFIED: Kind
KIND_GRAIN: Kind
KIND_ANCHOR: Kind
TRAFFIC_DEFAULT: Traffic
TRAFFIC_AGENT: Traffic
TRAFFIC_CHAT: Traffic

class MatchRequest(_message.Message):
    __slots__ = ("keys", "limit_tokens", "traffic")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    limit_tokens: int
    traffic: Traffic
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., limit_tokens: _Optional[int] = ..., traffic: _Optional[_Union[Traffic, str]] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("grains_matched", "anchor_grain", "boot_id")
    GRAINS_MATCHED_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_GRAIN_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    grains_matched: int
    anchor_grain: int
    boot_id: str
    def __init__(self, grains_matched: _Optional[int] = ..., anchor_grain: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class MissingRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class MissingReply(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, missing: _Optional[_Iterable[bool]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("keys", "anchor_grain")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_GRAIN_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    anchor_grain: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., anchor_grain: _Optional[int] = ...) -> None: ...

class FetchPart(_message.Message):
    __slots__ = ("object", "summary")
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    object: ObjectPart
    summary: FetchSummary
    def __init__(self, object: _Optional[_Union[ObjectPart, _Mapping]] = ..., summary: _Optional[_Union[FetchSummary, _Mapping]] = ...) -> None: ...

class ObjectPart(_message.Message):
    __slots__ = ("kind", "grain_index", "length", "offset", "data")
    KIND_FIELD_NUMBER: _ClassVar[int]
    GRAIN_INDEX_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    grain_index: int
    length: int
    offset: int
    data: bytes
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., grain_index: _Optional[int] = ..., length: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FetchSummary(_message.Message):
    __slots__ = ("grains", "anchor_grain", "reason", "memory_bytes")
    GRAINS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_GRAIN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    grains: int
    anchor_grain: int
    reason: str
    memory_bytes: int
    def __init__(self, grains: _Optional[int] = ..., anchor_grain: _Optional[int] = ..., reason: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class PutPart(_message.Message):
    __slots__ = ("head", "data")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    head: ObjectHead
    data: bytes
    def __init__(self, head: _Optional[_Union[ObjectHead, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ObjectHead(_message.Message):
    __slots__ = ("kind", "key", "parent", "grain_index", "traffic", "length")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    GRAIN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    key: bytes
    parent: bytes
    grain_index: int
    traffic: Traffic
    length: int
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., grain_index: _Optional[int] = ..., traffic: _Optional[_Union[Traffic, str]] = ..., length: _Optional[int] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("objects_saved", "objects_new", "objects_failed", "reasons")
    OBJECTS_SAVED_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_NEW_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    objects_saved: int
    objects_new: int
    objects_failed: int
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, objects_saved: _Optional[int] = ..., objects_new: _Optional[int] = ..., objects_failed: _Optional[int] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("keys", "lease_ms")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    lease_ms: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pin", "grains", "anchor_grain", "boot_id")
    PIN_FIELD_NUMBER: _ClassVar[int]
    GRAINS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_GRAIN_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    pin: int
    grains: int
    anchor_grain: int
    boot_id: str
    def __init__(self, pin: _Optional[int] = ..., grains: _Optional[int] = ..., anchor_grain: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: int
    def __init__(self, pin: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("grains", "anchors", "stripes", "stored_bytes", "pins", "memory_bytes", "version")
    GRAINS_FIELD_NUMBER: _ClassVar[int]
    ANCHORS_FIELD_NUMBER: _ClassVar[int]
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    grains: int
    anchors: int
    stripes: int
    stored_bytes: int
    pins: int
    memory_bytes: int
    version: str
    def __init__(self, grains: _Optional[int] = ..., anchors: _Optional[int] = ..., stripes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., pins: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...
