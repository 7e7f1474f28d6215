"""The globals that the pickle reader knows, and what each makes of its arguments; nothing is ever imported.

Tensors become :class:`~hsloader.formats.blocks.Tensor` descriptors; numpy arrays become descriptors of a block whose
bytes lie in the pickle; ``torch.Size`` becomes a tuple, a ``torch.dtype`` its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hsloader.formats.blocks import Block, Tensor, checked_tensor
from hsloader.store.dtypes import DTYPES, dtype_of

__all__ = ["GLOBALS", "STORAGES", "ArrayStub", "DtypeStub", "Global", "PickleError", "Storage", "short"]

Charge = Callable[[int], None]
Args = tuple[object, ...]
Make = Callable[[Charge, Args], object]


class PickleError(ValueError):
    """The pickle holds what a file of tensors does not; the message is a sentence without the path."""


def short(value: object) -> str:
    """A value of a pickle for a sentence: a number as it is, else its type (the text of nested values has no bound)."""
    return str(value)[:40] if type(value) is int else f"a {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Global:
    """A known global: ``make`` is called in its place (``None``: it may be named, not called)."""

    module: str
    name: str
    make: Make | None = None
    dtype: str | None = None  # of a storage class, or the dtype itself

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def call(self, charge: Charge, arguments: Args) -> object:
        """What the global makes of ``arguments``."""
        if self.make is None:
            raise PickleError(f"the pickle calls {self}, which is not allowed")
        return self.make(charge, arguments)


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage as a persistent id names it; ``dtype`` is ``None`` for an untyped one (``numel`` are bytes then)."""

    dtype: str | None
    block: Block


STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


# tensors ------------------------------------------------------------------------------------------------------------


def _rebuild_tensor(charge: Charge, args: Args) -> Tensor:
    """``_rebuild_tensor(storage, offset, size, stride)`` and v2, which adds requires_grad, hooks and metadata."""
    if len(args) < 4:
        raise PickleError("a tensor of the pickle lacks its storage, offset, size or stride")
    storage = args[0]
    if not isinstance(storage, Storage):
        raise PickleError("a tensor of the pickle has no storage")
    if storage.dtype is None:
        raise PickleError("a tensor of the pickle has an untyped storage and no dtype")
    if len(args) > 6 and args[6]:  # conj and neg bits: the bytes are not the values
        raise PickleError("a tensor of the pickle is a conjugated or negated view: save it with .resolve_neg()")
    return _tensor(storage.dtype, storage.block, args)


def _rebuild_tensor_v3(charge: Charge, args: Args) -> Tensor:
    """``(storage, offset, size, stride, requires_grad, hooks, dtype, ...)`` of an untyped storage."""
    if len(args) < 7 or not isinstance(args[0], Storage) or not isinstance(args[6], Global) or args[6].dtype is None:
        raise PickleError("a tensor of the pickle lacks its storage or has a dtype that is not supported")
    return _tensor(args[6].dtype, args[0].block, args)


def _tensor(dtype: str, block: Block, args: Args) -> Tensor:
    size, stride = args[2], args[3]
    if type(size) is not tuple or type(stride) is not tuple:
        raise PickleError("a tensor of the pickle has a size or stride that is not a tuple")
    return checked_tensor(dtype, size, stride, args[1], block)


def _rebuild_parameter(charge: Charge, args: Args) -> Tensor:
    if not args or not isinstance(args[0], Tensor):
        raise PickleError("a parameter of the pickle has no tensor")
    return args[0]


def _rebuild_from_type(charge: Charge, args: Args) -> Tensor:
    """``torch._tensor._rebuild_from_type_v2(function, type, arguments, state)`` of tensors with attributes."""
    if len(args) < 3 or not isinstance(args[0], Global) or type(args[2]) is not tuple:
        raise PickleError("a tensor of the pickle is made in an unknown way")
    made = args[0].call(charge, args[2])
    if not isinstance(made, Tensor):
        raise PickleError(f"{args[0]} in the pickle did not make a tensor")
    return made


def _rebuild_meta(charge: Charge, args: Args) -> object:
    raise PickleError("a tensor was saved on the meta device: it has a shape and no data")


# plain values -------------------------------------------------------------------------------------------------------


def _ordered_dict(charge: Charge, args: Args) -> dict[object, object]:
    if not args:
        return {}
    if len(args) != 1 or type(args[0]) is not list:
        raise PickleError("an ordered dict of the pickle is made of something that is not a list of pairs")
    charge(100 * len(args[0]))
    made: dict[object, object] = {}
    for pair in args[0]:
        if type(pair) not in (list, tuple) or len(pair) != 2 or type(pair[0]) not in (str, int):
            raise PickleError("an ordered dict of the pickle is made of something that is not a list of pairs")
        made[pair[0]] = pair[1]
    return made


def _size(charge: Charge, args: Args) -> Args:
    if len(args) != 1 or type(args[0]) not in (tuple, list):
        raise PickleError("a torch.Size of the pickle is not made of a tuple")
    charge(8 * len(args[0]))  # type: ignore[arg-type]
    return tuple(args[0])  # type: ignore[arg-type]


def _device(charge: Charge, args: Args) -> str:
    return ":".join(str(a)[:20] if type(a) in (str, int) else "?" for a in args[:2])


def _set(charge: Charge, args: Args) -> set[object]:
    if not args:
        return set()
    items = args[0]
    if len(args) != 1 or type(items) not in (list, tuple):
        raise PickleError("a set of the pickle is not made of a list")
    charge(72 * len(items))  # type: ignore[arg-type]
    if not all(type(v) in (str, float, bool, bytes) or (type(v) is int and abs(v) < 1 << 60) for v in items):  # type: ignore[attr-defined]
        raise PickleError("a set of the pickle holds something that is not a plain value")
    return set(items)  # type: ignore[call-overload,no-any-return]


def _encode(charge: Charge, args: Args) -> bytes:
    """``_codecs.encode(text, "latin1")``: how protocol 2 writes bytes."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        raise PickleError("_codecs.encode in the pickle is not the encoding of bytes as latin1")
    charge(len(args[0]))
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        raise PickleError("bytes in the pickle are written as a text that is not latin1") from None


def _bytes(charge: Charge, args: Args) -> bytes:
    if args:
        raise PickleError("the pickle calls bytes with arguments (not allowed)")
    return b""


# numpy --------------------------------------------------------------------------------------------------------------


class DtypeStub:
    """A numpy dtype under construction: ``dtype("i8", False, True)``, then its state with the byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: str) -> None:
        self.code = code
        self.order = "<" if len(code) > 1 and not code.endswith("1") else "|"

    def set_state(self, state: object) -> None:
        """Take the state tuple ``(3, byte order, subdtype, names, fields, item size, alignment, flags)``."""
        if type(state) is not tuple or len(state) < 5 or state[1] not in ("<", "|", "=", ">"):
            raise PickleError("a numpy dtype of the pickle has an unknown state")
        if state[2] is not None or state[3] is not None or state[4] is not None:
            raise PickleError("a numpy dtype of the pickle has fields: only plain numbers are read")
        self.order = state[1]

    def name(self) -> str:
        """The torch name of the dtype."""
        names = {"f": "float", "i": "int", "u": "uint", "b": "bool"}
        kind, size = self.code[:1], self.code[1:]
        bits = int(size) * 8 if size in ("1", "2", "4", "8") else 0
        name = "bool" if kind == "b" else f"{names.get(kind, '?')}{bits}"
        if name not in DTYPES:
            raise PickleError(f"a numpy value has the dtype {self.code[:20]!r}: only plain numbers are read")
        if self.order == ">" and dtype_of(name).item_size > 1:
            raise PickleError("a numpy value of the pickle is big-endian: only little-endian numbers are read")
        return name


class ArrayStub:
    """A numpy array under construction: made empty, then given its state."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def set_state(self, state: object) -> None:
        """Take the state tuple ``(1, shape, dtype, fortran order, bytes)``."""
        if type(state) is not tuple or len(state) != 5 or not isinstance(state[2], DtypeStub):
            raise PickleError("a numpy array of the pickle has an unknown state")
        self.tensor = _array(state[1], state[2], bool(state[3]), state[4])


def _array(shape: object, dtype: DtypeStub, fortran: bool, data: object) -> Tensor:
    if type(data) is not bytes or type(shape) is not tuple or len(shape) > 8:
        raise PickleError("a numpy array of the pickle has no plain bytes or no shape")
    name = dtype.name()
    if not all(type(n) is int and 0 <= n <= len(data) for n in shape):
        raise PickleError("the shape of a numpy array of the pickle does not fit its bytes")
    strides, step = [0] * len(shape), 1
    for axis in range(len(shape)) if fortran else reversed(range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    if step * dtype_of(name).item_size != len(data):
        raise PickleError(f"a numpy array of the pickle has {len(data)} bytes, its shape needs {step} elements")
    return checked_tensor(name, shape, strides, 0, Block("numpy array", len(data), offset=0, data=data))


def _reconstruct(charge: Charge, args: Args) -> ArrayStub:
    return ArrayStub()


def _dtype(charge: Charge, args: Args) -> DtypeStub:
    if not args or type(args[0]) is not str or len(args[0]) > 8:
        raise PickleError("a numpy dtype of the pickle has no name")
    return DtypeStub(args[0])


def _from_buffer(charge: Charge, args: Args) -> Tensor:
    """``_frombuffer(bytes, dtype, shape, order)``: arrays in protocol 5."""
    if len(args) != 4 or not isinstance(args[1], DtypeStub):
        raise PickleError("a numpy array of the pickle is made in an unknown way")
    return _array(args[2], args[1], args[3] == "F", args[0])


def _scalar(charge: Charge, args: Args) -> Tensor:
    if len(args) != 2 or not isinstance(args[0], DtypeStub):
        raise PickleError("a numpy scalar of the pickle is made in an unknown way")
    return _array((), args[0], False, args[1])


def _table() -> dict[tuple[str, str], Global]:
    table: dict[tuple[str, str], Global] = {}

    def add(modules: str, name: str, make: Make | None = None, dtype: str | None = None) -> None:
        for module in modules.split():
            table[module, name] = Global(module, name, make, dtype)

    for name, dtype in STORAGES.items():
        add("torch", name, dtype=dtype)
    add("torch torch.storage", "UntypedStorage")
    for name in DTYPES:
        add("torch", name, dtype=name)
    add("torch", "Size", _size)
    add("torch", "device", _device)
    add("torch", "Tensor")
    add("torch.nn.parameter", "Parameter")
    add("torch._utils", "_rebuild_tensor", _rebuild_tensor)
    add("torch._utils", "_rebuild_tensor_v2", _rebuild_tensor)
    add("torch._utils", "_rebuild_tensor_v3", _rebuild_tensor_v3)
    add("torch._utils", "_rebuild_parameter", _rebuild_parameter)
    add("torch._utils", "_rebuild_parameter_with_state", _rebuild_parameter)
    add("torch._utils", "_rebuild_meta_tensor_no_storage", _rebuild_meta)
    add("torch._tensor", "_rebuild_from_type_v2", _rebuild_from_type)
    add("collections", "OrderedDict", _ordered_dict)
    add("builtins __builtin__", "set", _set)
    add("builtins __builtin__", "frozenset", _set)
    add("builtins __builtin__", "bytes", _bytes)
    add("_codecs", "encode", _encode)
    add("numpy.core.multiarray numpy._core.multiarray", "_reconstruct", _reconstruct)
    add("numpy.core.multiarray numpy._core.multiarray", "scalar", _scalar)
    add("numpy.core.numeric numpy._core.numeric", "_frombuffer", _from_buffer)
    add("numpy", "dtype", _dtype)
    add("numpy", "ndarray")
    return table


GLOBALS = _table()
