"""Reads the pickle of a flight recorder without running it.

A pickle is a program: loading one runs whatever its author put there. This reader knows the opcodes
that build dicts, lists, tuples, texts and numbers, and refuses all others; so a file that would
call something is an error and not a call.
"""

import pickletools
from collections.abc import Callable
from typing import Any

from paceline.errors import DataError

MAX_BYTES = 64 << 20
MAX_OPCODES = 20_000_000
VALUES = frozenset({
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BININT", "BININT1", "BININT2",
    "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "SHORT_BINSTRING", "BINSTRING", "STRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
})  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
SKIPPED = frozenset({"PROTO", "FRAME"})
EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip
MARK = object()


def read_plain_pickle(raw: bytes, name: str) -> Any:
    """Return what a pickle of plain values holds; `DataError` for any other."""
    if len(raw) > MAX_BYTES:
        raise DataError(f"{name} has {len(raw)} bytes: no flight recorder writes so much")
    machine = _Machine()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
            if number > MAX_OPCODES:
                raise ValueError("it has too many parts")
            if opcode.name == "STOP":
                return _require_plain(machine.result())
            machine.run(opcode.name, argument)
    except (
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        UnicodeDecodeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DataError(
            f"{name} is not read: {error}\n"
            "hint: only plain values are read from a pickle, for one may run code; take the JSON of"
            " the same recorder (torch._C._distributed_c10d._dump_nccl_trace_json)"
        ) from error
    raise DataError(f"{name} is cut off: it is a pickle without an end")


class _Machine:
    """The part of pickle's stack machine that builds plain values."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        (found,) = self._stack
        return found

    def run(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name == "MARK":
            stack.append(MARK)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(argument)])
        elif name not in SKIPPED:
            self._build(name)

    def _build(self, name: str) -> None:
        stack = self._stack
        if name in ("SETITEMS", "SETITEM"):
            items = self._items() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
            _take(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPENDS", "APPEND"):
            items = self._items() if name == "APPENDS" else [stack.pop()]
            _take(stack[-1], list).extend(items)
        elif name in ("TUPLE", "LIST"):
            items = self._items()
            stack.append(tuple(items) if name == "TUPLE" else items)
        elif name == "DICT":
            items = self._items()
            stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(name[-1])
            items = [stack.pop() for _ in range(size)][::-1]
            stack.append(tuple(items))
        else:
            raise ValueError(f"its opcode {name} does more than build plain values")

    def _items(self) -> list[Any]:
        items: list[Any] = []
        while (top := self._stack.pop()) is not MARK:
            items.append(top)
        return items[::-1]


def _require_plain(value: Any) -> Any:
    """Return a value that can be written out: one that holds itself, or the same part so often that
    nobody could hold it, is refused."""
    sizes: dict[int, int] = {}  # parts of each container once it is written out; 0: it is open

    def size(part: Any) -> int:
        if not isinstance(part, dict | list | tuple):
            return 1
        if id(part) not in sizes:
            sizes[id(part)] = 0
            inside = part.values() if isinstance(part, dict) else part
            sizes[id(part)] = 1 + sum(map(size, inside))
        elif not sizes[id(part)]:
            raise ValueError("it holds itself")
        return sizes[id(part)]

    if size(value) > MAX_OPCODES:
        raise ValueError("it has too many parts")
    return value


def _take(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"it puts items into what is no {kind.__name__}")
    return value
