"""Restricted unpickler: replaces each class that a pickle refers to by a stand-in, so no code in it can run.

It also bounds memory. It limits the number of objects, and it limits the elements that are copied from existing
objects to the number of bytes of the pickle. A regular pickle stays within this limit, because it first writes what
it copies. The base is Python's unpickler written in Python: the one written in C allocates the sizes that a file
claims.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from datasvc.errors import ConfigError, CorruptDataError

# The same limit as for the header of a safetensors file: enough for about 200,000 tensors.
MAX_PICKLE_BYTES: Final = 32 << 20
MAX_OBJECTS: Final = 4 << 20
_MAX_INT_KEY: Final = 1 << 60

_Step = Callable[[Any], None]
# The opcodes for dataclasses, dicts, tuples, lists, texts and numbers. The others are refused: they may allocate any
# amount of memory.
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
    step: _Step = pickle._Unpickler.dispatch[opcode[0]]  # noqa: SLF001 - the public one is written in C
    return step


def _counted(step: _Step) -> _Step:
    def counted(self: PlainUnpickler) -> None:
        self.count_object()
        step(self)

    return counted


class PlainUnpickler(pickle._Unpickler):  # noqa: SLF001 - the public one is written in C
    """Base class of the unpicklers of each format. A subclass returns the stand-in for a name from `find_class`.

    Args:
        file: file that starts with the pickle; other content may follow.
        size_bytes: maximum size of the pickle.
        location: name of the file, for messages.
    """

    dispatch: ClassVar[dict[int, _Step]] = {
        **{opcode[0]: _python_step(opcode) for opcode in _FREE},
        **{opcode[0]: _counted(_python_step(opcode)) for opcode in _COUNTED},
    }

    # Attributes of the base class that its type stubs do not declare.
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: io.BytesIO, size_bytes: int, location: str) -> None:
        super().__init__(file, encoding="utf-8")
        self.location = location
        self._objects_left = MAX_OBJECTS
        self._copies_left = size_bytes

    def read(self) -> Any:
        """Read the pickle, with stand-ins for its objects.

        Raises:
            ConfigError: the pickle refers to a class that is not allowed, or has too many objects.
            CorruptDataError: the pickle is damaged.
        """
        try:
            return self.load()
        except (ConfigError, CorruptDataError):
            raise
        except Exception as error:  # noqa: BLE001 - damaged or malicious bytes may raise any exception
            raise CorruptDataError(f"{self.location} is damaged: {type(error).__name__}: {error}") from None

    def count_object(self) -> None:
        """Count an object.

        Raises:
            ConfigError: the pickle has too many objects.
        """
        self._objects_left -= 1
        if self._objects_left < 0:
            raise ConfigError(
                f"{self.location} holds more than {MAX_OBJECTS} values; keep long lists as tensors or arrays"
            )

    def count_copies(self, num: int) -> None:
        """Count `num` elements that are copied.

        Raises:
            CorruptDataError: the pickle copies more elements than it has bytes.
        """
        self._copies_left -= num
        if self._copies_left < 0:
            raise CorruptDataError(
                f"{self.location} copies more elements than it has bytes, unlike any regular file; get another copy"
            )

    def build(self, target: Any, state: Any) -> None:  # noqa: ARG002 - for subclasses
        """Set the state of an object, by reference.

        Raises:
            TypeError: the object cannot have a state.
        """
        raise TypeError(f"a {type(target).__name__} cannot have a state")

    def is_key(self, key: object) -> bool:
        """Return whether `key` is allowed as a key of a dict: only types that are cheap to hash.

        A tuple could contain the same tuple many times, and large integers can be chosen to collide.
        """
        return key is None or type(key) in {str, bool, float} or (type(key) is int and abs(key) < _MAX_INT_KEY)

    def _check_keys(self, keys: Sequence[object]) -> None:
        for key in keys:
            if not self.is_key(key):
                raise ConfigError(
                    f"{self.location} has a dict key of type {type(key).__name__}; expected a text, or a number "
                    "below 2**60"
                )

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
