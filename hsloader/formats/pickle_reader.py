"""A strict reader of torch's pickles: an interpreter of its own that knows tensors and plain values, and nothing else.

``pickle.Unpickler`` runs what a file says and allocates what a file asks for, even where ``find_class`` is
restricted (nine bytes, ``LONG_BINPUT 0x1fffffff``, take 8.2 GB).  This interpreter never imports, never calls what a
file names, and makes nothing larger than the bytes that it was made from: globals are looked up in a table
(``pickle_globals.py``), the memo is a dict, opcodes, containers and nesting are counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from hsloader.formats.blocks import BlockError
from hsloader.formats.pickle_globals import GLOBALS, ArrayStub, DtypeStub, Global, PickleError, Storage

__all__ = ["MAX_PICKLE", "FindStorage", "PickleCutError", "PickleError", "read_pickle"]

MAX_PICKLE = 64 << 20  # bytes of a pickle; samples with python lists of 100k tokens have under 1 MiB
_MAX_OPCODES = 4_000_000
_MAX_CONTAINERS = 200_000
_MAX_MEMO = 500_000
_MAX_DEPTH = 200
_MAX_KEYS = 500_000

FindStorage = Callable[[tuple[object, ...]], Storage]


class PickleCutError(PickleError):
    """The data end inside the pickle: a truncated file, or a stream of which more must be read."""


class _Machine:
    """The state of one run: the stack is split at marks as in CPython's unpickler."""

    __slots__ = ("budget", "containers", "data", "find_storage", "keys", "marks", "memo", "pos", "stack")

    def __init__(self, data: bytes, pos: int, find_storage: FindStorage) -> None:
        self.data = data
        self.pos = pos
        self.find_storage = find_storage
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.containers = 0
        self.keys = 0
        self.budget = max(1 << 20, 4 * len(data))  # bytes that calls may make (latin-1 encodings of strings)

    # reading arguments ------------------------------------------------------------------------------------------

    def take(self, n: int) -> bytes:
        """The next ``n`` bytes."""
        end = self.pos + n
        if end > len(self.data):
            raise PickleCutError(f"truncated: the pickle ends inside an opcode that needs {n} bytes")
        piece = self.data[self.pos : end]
        self.pos = end
        return piece

    def line(self) -> str:
        """The text up to the next newline (the name of a global)."""
        end = self.data.find(b"\n", self.pos, self.pos + 512)
        if end < 0:
            if self.pos + 512 > len(self.data):
                raise PickleCutError("truncated: the pickle ends inside the name of a global")
            raise PickleError("the name of a global in the pickle is longer than 512 bytes")
        text = self.data[self.pos : end].decode("utf-8", "replace")
        self.pos = end + 1
        return text

    # the stack --------------------------------------------------------------------------------------------------

    def pop(self) -> object:
        """The top of the stack."""
        if not self.stack:
            raise PickleError("the pickle takes a value from an empty stack")
        return self.stack.pop()

    def top(self) -> object:
        """The top of the stack, left there."""
        if not self.stack:
            raise PickleError("the pickle looks at an empty stack")
        return self.stack[-1]

    def pop_mark(self) -> list[object]:
        """The values above the last mark."""
        if not self.marks:
            raise PickleError("the pickle closes a mark that was never set")
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def new(self, value: object) -> None:
        """Push a new container."""
        self.containers += 1
        if self.containers > _MAX_CONTAINERS:
            raise PickleError(f"the pickle makes more than {_MAX_CONTAINERS} lists, tuples and dicts (limit)")
        self.stack.append(value)

    def remember(self, index: int) -> None:
        """Put the top of the stack into the memo."""
        if len(self.memo) >= _MAX_MEMO:
            raise PickleError(f"the pickle remembers more than {_MAX_MEMO} values (limit)")
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        """Push what the memo holds."""
        try:
            self.stack.append(self.memo[index])
        except KeyError:
            raise PickleError(f"the pickle refers to value {index}, which it never made") from None

    def charge(self, nbytes: int) -> None:
        """Account for bytes that a call makes."""
        self.budget -= nbytes
        if self.budget < 0:
            raise PickleError("calls in the pickle make more bytes than the file could hold (limit)")

    def set_items(self, target: object, items: list[object]) -> None:
        """Put key-value pairs into a dict; keys are plain scalars, since hashing nested tuples can take forever."""
        if type(target) is not dict or len(items) % 2:
            raise PickleError("the pickle sets items of something that is not a dict")
        self.keys += len(items) // 2
        if self.keys > _MAX_KEYS:
            raise PickleError(f"the dicts of the pickle have more than {_MAX_KEYS} keys (limit)")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not _is_scalar(key):
                raise PickleError(f"a dict of the pickle has a key of type {type(key).__name__}, expected text")
            target[key] = value

    def call(self, function: object, arguments: object) -> object:
        """What a known global makes of its arguments."""
        if not isinstance(function, Global):
            raise PickleError("the pickle calls something that is not a global (forbidden)")
        if type(arguments) is not tuple:
            raise PickleError(f"the pickle calls {function} with something that is not a tuple")
        return function.call(self.charge, arguments)


def _is_scalar(value: object) -> bool:
    kind = type(value)
    if kind is int:
        return -(1 << 60) < value < 1 << 60  # type: ignore[operator]
    return kind in (str, bool, float, bytes) or value is None


# opcodes ------------------------------------------------------------------------------------------------------------


def _proto(m: _Machine) -> None:
    version = m.take(1)[0]
    if not 2 <= version <= 5:
        raise PickleError(f"the pickle has protocol {version}; protocols 2 to 5 are read")


def _frame(m: _Machine) -> None:
    m.take(8)


def _mark(m: _Machine) -> None:
    if len(m.marks) >= _MAX_DEPTH:
        raise PickleError(f"the pickle is nested more than {_MAX_DEPTH} deep (limit)")
    m.marks.append(m.stack)
    m.stack = []


def _long(width: int) -> Callable[[_Machine], None]:
    def op(m: _Machine) -> None:
        count = int.from_bytes(m.take(width), "little")
        if count > 255:
            raise PickleError(f"the pickle has a number of {count} bytes (limit 255)")
        m.stack.append(int.from_bytes(m.take(count), "little", signed=True))

    return op


def _text(width: int) -> Callable[[_Machine], None]:
    def op(m: _Machine) -> None:
        raw = m.take(int.from_bytes(m.take(width), "little"))
        try:
            m.stack.append(raw.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise PickleError("a text in the pickle is not UTF-8") from None

    return op


def _blob(width: int) -> Callable[[_Machine], None]:
    def op(m: _Machine) -> None:
        m.stack.append(m.take(int.from_bytes(m.take(width), "little")))

    return op


def _tuple_of(n: int) -> Callable[[_Machine], None]:
    def op(m: _Machine) -> None:
        if len(m.stack) < n:
            raise PickleError("the pickle makes a tuple of an empty stack")
        items = tuple(m.stack[-n:])
        del m.stack[-n:]
        m.new(items)

    return op


def _tuple(m: _Machine) -> None:
    items = tuple(m.pop_mark())
    m.new(items)


def _append(m: _Machine) -> None:
    value = m.pop()
    _extend(m.top(), [value])


def _appends(m: _Machine) -> None:
    items = m.pop_mark()
    _extend(m.top(), items)


def _extend(target: object, items: list[object]) -> None:
    if type(target) is not list:
        raise PickleError("the pickle appends to something that is not a list")
    target.extend(items)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items(m.top(), [key, value])


def _set_items(m: _Machine) -> None:
    items = m.pop_mark()
    m.set_items(m.top(), items)


def _add_items(m: _Machine) -> None:
    items, target = m.pop_mark(), m.top()
    if type(target) is not set or not all(map(_is_scalar, items)):
        raise PickleError("the pickle adds items to something that is not a set of plain values")
    target.update(items)


def _frozen_set(m: _Machine) -> None:
    items = m.pop_mark()
    if not all(map(_is_scalar, items)):
        raise PickleError("the pickle makes a set of something that is not a plain value")
    m.new(frozenset(items))


def _global(m: _Machine) -> None:
    module = m.line()
    m.stack.append(_known(module, m.line()))


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleError("the pickle names a global by something that is not text")
    m.stack.append(_known(module, name))


def _known(module: str, name: str) -> Global:
    found = GLOBALS.get((module, name))
    if found is None:
        raise PickleError(
            f"the pickle asks for the global {module[:80]}.{name[:80]}, which no file of tensors needs: not allowed, "
            "and nothing was executed"
        )
    return found


def _reduce(m: _Machine) -> None:
    arguments = m.pop()
    m.stack.append(m.call(m.pop(), arguments))


def _build(m: _Machine) -> None:
    state, target = m.pop(), m.top()
    if isinstance(target, (ArrayStub, DtypeStub)):
        target.set_state(state)
    elif type(target) is not dict:
        raise PickleError("the pickle sets attributes of an object (forbidden)")


def _persistent(m: _Machine) -> None:
    reference = m.pop()
    if type(reference) is not tuple:
        raise PickleError("the pickle refers to a storage by something that is not a tuple")
    m.stack.append(m.find_storage(reference))


def _pop_to_mark(m: _Machine) -> None:
    m.pop_mark()


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()


_OPS: dict[int, Callable[[_Machine], None]] = {
    ord("h"): lambda m: m.recall(m.take(1)[0]),
    ord("q"): lambda m: m.remember(m.take(1)[0]),
    ord("X"): _text(4),
    ord("K"): lambda m: m.stack.append(m.take(1)[0]),
    ord("("): _mark,
    ord("t"): _tuple,
    ord("Q"): _persistent,
    ord("R"): _reduce,
    ord(")"): lambda m: m.new(()),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("N"): lambda m: m.stack.append(None),
    ord("M"): lambda m: m.stack.append(int.from_bytes(m.take(2), "little")),
    ord("J"): lambda m: m.stack.append(int.from_bytes(m.take(4), "little", signed=True)),
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    0x8A: _long(1),
    0x8B: _long(4),
    ord("c"): _global,
    0x93: _stack_global,
    ord("}"): lambda m: m.new({}),
    ord("]"): lambda m: m.new([]),
    0x8F: lambda m: m.new(set()),
    ord("u"): _set_items,
    ord("s"): _set_item,
    ord("e"): _appends,
    ord("a"): _append,
    0x90: _add_items,
    0x91: _frozen_set,
    ord("r"): lambda m: m.remember(int.from_bytes(m.take(4), "little")),
    ord("j"): lambda m: m.recall(int.from_bytes(m.take(4), "little")),
    0x94: lambda m: m.remember(len(m.memo)),
    0x8C: _text(1),
    0x8D: _text(8),
    ord("C"): _blob(1),
    ord("B"): _blob(4),
    0x8E: _blob(8),
    0x96: _blob(8),
    0x80: _proto,
    0x95: _frame,
    0x81: _reduce,  # NEWOBJ: the known classes are made as if they were called
    ord("b"): _build,
    ord("0"): _pop,
    ord("1"): _pop_to_mark,
    ord("2"): lambda m: m.stack.append(m.top()),
}
_STOP, _PUT, _GET = ord("."), ord("q"), ord("h")


def read_pickle(data: bytes, find_storage: FindStorage, start: int = 0) -> tuple[object, int]:
    """The object of the pickle at ``start`` and the position after it.

    Values are python scalars, text, bytes, lists, tuples, dicts, sets, and ``Tensor`` descriptors.  ``find_storage``
    turns a persistent id into a ``Storage``.  ``PickleError`` says what was not accepted, ``PickleCutError`` that the
    data end too early.
    """
    if data[start : start + 1] != b"\x80":
        raise PickleError("not a pickle of protocol 2 to 5")
    machine = _Machine(data, start, find_storage)
    ops, memo, last = _OPS, machine.memo, len(data) - 1
    try:
        for _ in range(_MAX_OPCODES):
            pos = machine.pos
            if pos > last:
                raise PickleCutError("truncated: the pickle has no end")
            code = data[pos]
            if code == _PUT and pos < last and machine.stack:  # PUT and GET are half of all opcodes: done here
                memo[data[pos + 1]] = machine.stack[-1]
                machine.pos = pos + 2
                continue
            if code == _GET and pos < last and data[pos + 1] in memo:
                machine.stack.append(memo[data[pos + 1]])
                machine.pos = pos + 2
                continue
            machine.pos = pos + 1
            if code == _STOP:
                return machine.pop(), machine.pos
            op = ops.get(code)
            if op is None:
                raise PickleError(f"the pickle has the opcode {code:#04x}, which no file of tensors needs (forbidden)")
            op(machine)
    except BlockError as error:
        raise PickleError(str(error)) from None
    raise PickleError(f"the pickle has more than {_MAX_OPCODES} opcodes (limit)")
