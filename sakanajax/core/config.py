"""Configs: a `ConfigDict` (what people edit) becomes a frozen dataclass (what code reads), once, at the entry.

`from_config` walks the two side by side. Whatever does not fit is one `UserError` that names the dotted key:
a typing slip on the command line is answered with the key, the value and what would have been right.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import math
import pathlib
import types
import typing
from typing import Any, Literal, TypeVar, Union

from sakanajax.core.errors import UserError

T = TypeVar("T")


class FrozenDict(dict):
  """A dict that cannot change, so that a config holding one stays hashable (static under jit)."""

  def __hash__(self) -> int:
    return hash(frozenset(self.items()))

  def _refuse(self, *unused_args, **unused_kwargs):
    raise TypeError("a config cannot be changed; use dataclasses.replace")

  __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse

  def __reduce__(self):
    return FrozenDict, (dict(self),)


def from_config(cls: type[T], config: Any, path: str = "config") -> T:
  """Returns the frozen dataclass `cls` filled from a ConfigDict or a mapping.

  Nested dataclasses, Optional and unions, Literal, tuple[T, ...] and tuple[A, B], dict[K, V], pathlib.Path, bool, int,
  float and str are checked; an int is accepted where a float is due and a list where a tuple is due.

  Raises UserError: an unknown or a missing key, a value of another type, a number that is not finite, or whatever
  `__post_init__` refuses with ValueError. The message begins with the dotted path of the key.
  """
  if isinstance(config, cls):
    return config
  if hasattr(config, "to_dict"):
    config = config.to_dict()
  if not isinstance(config, collections.abc.Mapping):
    raise UserError(f"{path}: expected a section with the keys {_keys(cls)}, got {_show(config)}")
  fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
  for key in config:
    if key not in fields:
      raise UserError(f"{path}.{key}: unknown key{_did_you_mean(str(key), fields)}; known keys: {_keys(cls)}")
  hints = typing.get_type_hints(cls)
  values = {}
  for name, field in fields.items():
    if name in config:
      values[name] = _coerce(hints[name], config[name], f"{path}.{name}")
    elif isinstance(default := _default(field), dict):
      values[name] = _freeze(default)
    elif default is dataclasses.MISSING:
      raise UserError(f"{path}.{name}: missing; give a value of type {_name(hints[name])}")
  try:
    return cls(**values)
  except ValueError as error:
    raise UserError(f"{path}: {error}") from error


def complete(cls: type, values: collections.abc.Mapping[str, Any]) -> dict[str, Any]:
  """Returns `values` with every default of the frozen dataclass `cls` filled in, so that flags can override any key."""

  def plain(value):
    if dataclasses.is_dataclass(value):
      return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, collections.abc.Mapping):
      return {key: plain(item) for key, item in value.items()}
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value

  return plain(from_config(cls, values))


def to_dict(config: Any) -> Any:
  """Returns the plain JSON-able form: dataclasses become dicts, tuples become lists, paths and keys become str."""
  if dataclasses.is_dataclass(config) and not isinstance(config, type):
    return {field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)}
  if isinstance(config, collections.abc.Mapping):
    return {str(key): to_dict(value) for key, value in config.items()}
  if isinstance(config, (list, tuple)):
    return [to_dict(value) for value in config]
  if isinstance(config, pathlib.PurePath):
    return str(config)
  return config


def _coerce(hint: Any, value: Any, path: str) -> Any:
  """Returns `value` as the type `hint`, or raises UserError at `path`."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if hint is Any or hint is object:
    return _freeze(value)
  if origin in (Union, types.UnionType):
    return _union(args, value, path, hint)
  if origin is Literal:
    if any(value == choice and type(value) is type(choice) for choice in args):
      return value
    guess = _did_you_mean(str(value), [str(choice) for choice in args])
    raise UserError(f"{path}: expected one of {', '.join(map(repr, args))}, got {_show(value)}{guess}")
  if dataclasses.is_dataclass(hint):
    return from_config(hint, value, path)
  if hint is tuple or origin is tuple:
    return _tuple(args, value, path, hint)
  if hint is dict or origin in (dict, collections.abc.Mapping):
    return _dict(args, value, path, hint)
  return _scalar(hint, value, path)


def _union(args: tuple, value: Any, path: str, hint: Any) -> Any:
  if value is None and type(None) in args:
    return None
  args = [arg for arg in args if arg is not type(None)]
  # An exact type wins over a conversion: 1 stays an int under `float | int`.
  for arg in sorted(args, key=lambda arg: arg is not type(value)):
    try:
      return _coerce(arg, value, path)
    except UserError:
      if len(args) == 1:
        raise
  raise UserError(f"{path}: expected {_name(hint)}, got {_show(value)}")


def _tuple(args: tuple, value: Any, path: str, hint: Any) -> tuple:
  if not isinstance(value, (tuple, list)):
    raise UserError(f"{path}: expected {_name(hint)}, got {_show(value)}")
  if len(args) == 2 and args[1] is Ellipsis:
    args = (args[0],) * len(value)
  elif not args:
    args = (Any,) * len(value)
  elif len(args) != len(value):
    raise UserError(f"{path}: expected {len(args)} values, got {_show(value)}")
  return tuple(_coerce(arg, item, f"{path}[{i}]") for i, (arg, item) in enumerate(zip(args, value)))


def _dict(args: tuple, value: Any, path: str, hint: Any) -> FrozenDict:
  if not isinstance(value, collections.abc.Mapping):
    raise UserError(f"{path}: expected {_name(hint)}, got {_show(value)}")
  key_type, value_type = args or (Any, Any)
  return FrozenDict(
      {_coerce(key_type, key, f"{path}.{key}"): _coerce(value_type, item, f"{path}.{key}")
       for key, item in value.items()}
  )


def _scalar(hint: Any, value: Any, path: str) -> Any:
  if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
    if not math.isfinite(value):
      raise UserError(f"{path}: expected a finite number, got {value}")
    return float(value)
  if hint is pathlib.Path and isinstance(value, (str, pathlib.Path)):
    return pathlib.Path(value)
  # bool is a subclass of int, but True is not a number of steps.
  if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
    return value
  raise UserError(f"{path}: expected {_name(hint)}, got {_show(value)}")


def _freeze(value: Any) -> Any:
  """Returns untyped config data with lists as tuples and mappings as FrozenDicts."""
  if isinstance(value, collections.abc.Mapping):
    return FrozenDict({key: _freeze(item) for key, item in value.items()})
  return tuple(_freeze(item) for item in value) if isinstance(value, (list, tuple)) else value


def _default(field: dataclasses.Field) -> Any:
  return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _did_you_mean(word: str, choices: Any) -> str:
  close = difflib.get_close_matches(word, list(choices), n=1)
  return f"; did you mean {close[0]}?" if close else ""


def _keys(cls: type) -> str:
  return ", ".join(field.name for field in dataclasses.fields(cls) if field.init)


def _name(hint: Any) -> str:
  if isinstance(hint, type) and not typing.get_args(hint):
    return hint.__name__
  return str(hint).replace("typing.", "").replace("NoneType", "None")


def _show(value: Any) -> str:
  text = repr(value)
  return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
