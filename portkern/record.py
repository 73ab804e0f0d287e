"""Frozen records that survive a JSON round trip: the base of every core type."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, ClassVar, TypeVar, overload

from portkern.errors import InvalidRecord

R = TypeVar("R", bound="Record")
V = TypeVar("V")
D = TypeVar("D")


class FrozenMap(Mapping[str, V]):
    """An immutable, hashable mapping from strings, ordered by key."""

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[str, V] | None = None, /, **more: V) -> None:
        given = {**items, **more} if items else more
        self._items: dict[str, V] = dict(sorted(given.items()) if len(given) > 1 else given)
        self._hash: int | None = None

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    # Mapping's own go by __iter__ and __getitem__, and these are asked at every new shape.
    def __contains__(self, key: object) -> bool:
        return key in self._items

    @overload
    def get(self, key: str, default: None = None, /) -> V | None: ...
    @overload
    def get(self, key: str, default: D, /) -> V | D: ...
    def get(self, key: str, default: Any = None, /) -> Any:
        return self._items.get(key, default)

    def keys(self) -> KeysView[str]:
        return self._items.keys()

    def values(self) -> ValuesView[V]:
        return self._items.values()

    def items(self) -> ItemsView[str, V]:
        return self._items.items()

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(tuple(self._items.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenMap):
            return self._items == other._items
        return NotImplemented

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenMap, (self._items,))  # string hashes differ from process to process


def plain(value: Any) -> Any:
    """``value`` as JSON types: records and mappings to dicts, tuples to lists."""
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def canonical(value: Any) -> str:
    """The one JSON text of ``value``: sorted keys, no white space. Hashes and keys use it."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


class Record:
    """Base of the frozen dataclasses. ``_nested`` names fields that are records themselves."""

    _nested: ClassVar[Mapping[str, type[Record]]] = {}

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {field.name: plain(getattr(self, field.name)) for field in _fields(type(self))}

    @classmethod
    def from_json(cls: type[R], data: Any) -> R:
        """The record that ``data`` describes.

        Raises InvalidRecord when a key is unknown or missing, or a value does not validate.
        """
        if not isinstance(data, Mapping):
            raise InvalidRecord(f"{cls.__name__}: expected an object, got {type(data).__name__}")
        known = {field.name for field in _fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise InvalidRecord(f"{cls.__name__}: unknown keys {unknown}; it takes {sorted(known)}")
        values = dict(data)
        for name, kind in cls._nested.items():
            if values.get(name) is not None:
                values[name] = kind.from_json(values[name])
        try:
            return cls(**values)
        except InvalidRecord:
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRecord(f"{cls.__name__}: {error}") from error

    def _set(self, **values: Any) -> None:
        """Set fields while the record is being made: only ``__post_init__`` calls this."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise InvalidRecord(f"{type(self).__name__}: {message}")


def _fields(kind: type[Record]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)  # type: ignore[arg-type]


def frozen_map(record: Record, name: str, value: Any, kinds: tuple[type, ...]) -> FrozenMap[Any]:
    """``value`` as a FrozenMap whose keys are strings and whose values are of ``kinds``. Raises InvalidRecord."""
    # Records are made at every new shape, so what is nearly always so is asked first.
    if type(value) is not FrozenMap and not isinstance(value, Mapping):
        raise InvalidRecord(f"{type(record).__name__}: {name} must be a mapping, got {value!r}")
    for key, item in value.items():
        if type(key) is str and type(item) in kinds:
            continue
        if not isinstance(key, str):
            raise InvalidRecord(f"{type(record).__name__}: {name} has the key {key!r}, not a string")
        if not isinstance(item, kinds) or (isinstance(item, bool) and bool not in kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise InvalidRecord(f"{type(record).__name__}: {name}[{key!r}] is {item!r}, expected {expected}")
    return value if isinstance(value, FrozenMap) else FrozenMap(value)
