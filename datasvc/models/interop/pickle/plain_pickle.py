"""Pickles of others, gone through step by step with stand-ins for what they name, so that nothing in them can run.

A few bytes may not cost much: every object that is made counts, and what copies an object that is there already may
copy no more than the pickle has bytes, which an honest one needs to write it first. Python's own unpickler in Python
is used, not the one in C: that one allocates what a file claims to need.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from datasvc.errors import ConfigError, CorruptDataError

# As much as the header of a safetensors file may have: some 200,000 tensors.
MAX_PICKLE_BYTES: Final = 32 << 20
MAX_OBJECTS: Final = 4 << 20
_MAX_KEY: Final = 1 << 60

_Step = Callable[[Any], None]
# What pickling dataclasses, dicts, tuples, lists, texts and numbers takes. Others may allocate what they like.
_FREE: Final = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET,
    pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.EMPTY_TUPLE, pickle.APPEND,
    pickle.APPENDS, pickle.BINPERSID,
)  # fmt: skip
_COUNTED: Final = (
    pickle.MARK, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT,
    pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.SHORT_BINSTRING, pickle.TUPLE,
    pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.GLOBAL,
    pickle.STACK_GLOBAL,
)  # fmt: skip


def _python_step(opcode: bytes) -> _Step:
    step: _Step = pickle._Unpickler.dispatch[opcode[0]]  # noqa: SLF001 - see above
    return step


def _counted(step: _Step) -> _Step:
    def counted(self: PlainUnpickler) -> None:
        self.count_object()
        step(self)

    return counted


class PlainUnpickler(pickle._Unpickler):  # noqa: SLF001 - the one in Python
    """Base of the unpicklers of each format, which say by `find_class` what stands in for a name.

    Args:
        file: of the pickle; may go on behind it.
        size_bytes: of the pickle, at most.
        location: for messages.
    """

    dispatch: ClassVar[dict[int, _Step]] = {
        **{opcode[0]: _python_step(opcode) for opcode in _FREE},
        **{opcode[0]: _counted(_python_step(opcode)) for opcode in _COUNTED},
    }

    # Of the base class, which its types leave out.
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: io.BytesIO, size_bytes: int, location: str) -> None:
        super().__init__(file, encoding="utf-8")
        self.location = location
        self._objects_left = MAX_OBJECTS
        self._copies_left = size_bytes

    def read(self) -> Any:
        """Return what the pickle holds, as stand-ins. Raises ConfigError from `find_class`, CorruptDataError."""
        try:
            return self.load()
        except (ConfigError, CorruptDataError):
            raise
        except Exception as error:  # noqa: BLE001 - hostile bytes may raise anything; all of it means the same
            raise CorruptDataError(f"{self.location} is damaged: {type(error).__name__}: {error}") from None

    def count_object(self) -> None:
        """Take note of an object. Raises ConfigError where there are too many."""
        self._objects_left -= 1
        if self._objects_left < 0:
            raise ConfigError(
                f"{self.location} holds more than {MAX_OBJECTS} values; keep long lists as tensors or arrays"
            )

    def count_copies(self, num: int) -> None:
        """Take note of `num` elements that are copied. Raises CorruptDataError where few bytes copy too many."""
        self._copies_left -= num
        if self._copies_left < 0:
            raise CorruptDataError(f"{self.location} copies more than it holds; no honest file does")

    def build(self, made: Any, state: Any) -> None:  # noqa: ARG002 - for those that override it
        """Give an object its state, by reference. Raises TypeError where it can have none."""
        raise TypeError(f"a {type(made).__name__} cannot have a state")

    def is_key(self, key: object) -> bool:
        """Return whether hashing `key` is cheap: a tuple may hold itself very often, and numbers collide."""
        return key is None or type(key) in {str, bool, float} or (type(key) is int and abs(key) < _MAX_KEY)

    def _check_keys(self, keys: Sequence[object]) -> None:
        for key in keys:
            if not self.is_key(key):
                raise ConfigError(f"{self.location} has a key that is neither text nor a plain number: {type(key)}")

    def _set_item(self) -> None:
        self._check_keys(self.stack[-2:-1])
        self._check_target(self.stack[-3])
        _python_step(pickle.SETITEM)(self)

    def _set_items(self) -> None:
        self._check_keys(self.stack[::2])
        self._check_target(self.metastack[-1][-1])
        _python_step(pickle.SETITEMS)(self)

    def _check_target(self, target: object) -> None:
        if not isinstance(target, dict):
            raise TypeError(f"a {type(target).__name__} has no keys")

    def _reduce(self) -> None:
        self.count_object()
        self.count_copies(len(self.stack[-1]))
        _python_step(pickle.REDUCE)(self)

    def _new_object(self) -> None:
        self.count_object()
        self.count_copies(len(self.stack[-1]))
        _python_step(pickle.NEWOBJ)(self)

    def _build(self) -> None:
        state = self.stack.pop()
        self.build(self.stack[-1], state)

    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.REDUCE[0]] = _reduce
    dispatch[pickle.NEWOBJ[0]] = _new_object
    dispatch[pickle.BUILD[0]] = _build
