"""A pickle parser that imports and calls nothing, whatever the pickle asks for.

Python's own unpickler calls what it finds, and a malicious pickle can make it use all memory or run forever. This one
knows the few opcodes of torch's files. An object is returned as its class, arguments and state.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.errors import CheckpointError


class GlobalName(NamedTuple):
    """A function or class that a pickle names."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class PickledCall:
    """A call that the pickle asks for: the callable, its arguments, and the state that would be set on the result."""

    kind: GlobalName
    args: tuple[Any, ...]
    state: Any = None


@dataclass(slots=True, eq=False)
class PersistentId:
    """A reference to something outside the pickle, such as a storage."""

    key: Any


class _Unknown(Exception):  # never leaves this file
    """A pickle names something unknown."""


_PLAIN_KEYS = (
    str,
    int,
    float,
    bool,
    type(None),
    bytes,
    PickledCall,
)  # hashing a tuple can take forever, so tuples are refused


_REFUSED = object()


def read_pickle(data: bytes, known: Collection[GlobalName], what: str, *, otherwise: Any = _REFUSED) -> Any:
    """The value that a pickle describes. Where the pickle names anything unknown: ``otherwise``, or an error."""
    try:
        return _run(data, known, what)
    except _Unknown as error:
        if otherwise is not _REFUSED:
            return otherwise
        raise CheckpointError(
            f"{what} asks for {error}, which is no part of its format: it was made by other software, or to do harm; "
            "nothing of it was run"
        ) from None
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, MemoryError) as error:
        raise CheckpointError(f"{what} is damaged: it is no whole pickle ({type(error).__name__})") from error


def _run(data: bytes, known: Collection[GlobalName], what: str) -> Any:
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}
    names: dict[tuple[str, str], GlobalName] = {}
    at, size = 0, len(data)

    def stretch(begin: int, length: int) -> bytes:
        if begin + length > size:
            raise ValueError("a string ends beyond the end")
        return data[begin : begin + length]

    def named(module: Any, name: Any) -> GlobalName:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is no string")
        found = names.get((module, name))
        if found is None:
            found = GlobalName(module, name)
            if found not in known:
                raise _Unknown(f"'{module:.100}.{name:.100}'")
            names[module, name] = found
        return found

    # The most frequent opcodes come first.
    while True:
        op = data[at]
        at += 1
        if op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif op == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif op == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif op == 0x8C:  # SHORT_BINUNICODE
            length = data[at]
            stack.append(stretch(at + 1, length).decode())
            at += 1 + length
        elif op == 0x6A:  # LONG_BINGET
            stack.append(memo[int.from_bytes(stretch(at, 4), "little")])
            at += 4
        elif 0x85 <= op <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
            count = op - 0x84
            items = tuple(stack[-count:])
            if len(items) < count:
                raise ValueError("a tuple of nothing")
            stack[-count:] = [items]
        elif op == 0x52:  # REDUCE
            args = stack.pop()
            stack[-1] = _made(stack[-1], args)
        elif op == 0x28:  # MARK
            marks.append(stack)
            stack = []
        elif op == 0x74:  # TUPLE
            items = tuple(stack)
            stack = marks.pop()
            stack.append(items)
        elif op == 0x75:  # SETITEMS
            pairs, stack = stack, marks.pop()
            _set(stack[-1], pairs)
        elif op == 0x81:  # NEWOBJ
            args = stack.pop()
            stack[-1] = _made(stack[-1], args)
        elif op == 0x62:  # BUILD
            state = stack.pop()
            if type(stack[-1]) is not PickledCall or stack[-1].state is not None:
                raise ValueError("a state of what has none")
            stack[-1].state = state
        elif op == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif op == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif op == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif op == 0x4D:  # BININT2
            stack.append(int.from_bytes(stretch(at, 2), "little"))
            at += 2
        elif op == 0x4A:  # BININT
            stack.append(int.from_bytes(stretch(at, 4), "little", signed=True))
            at += 4
        elif op == 0x4E:  # NONE
            stack.append(None)
        elif op in (0x88, 0x89):  # NEWTRUE, NEWFALSE
            stack.append(op == 0x88)
        elif op == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif op == 0x72:  # LONG_BINPUT
            memo[int.from_bytes(stretch(at, 4), "little")] = stack[-1]
            at += 4
        elif op in (0x58, 0x8D, 0x42, 0x43, 0x8E):  # BINUNICODE, BINUNICODE8, BINBYTES, SHORT_BINBYTES, BINBYTES8
            width = {0x43: 1, 0x58: 4, 0x42: 4}.get(op, 8)
            length = int.from_bytes(stretch(at, width), "little")
            text = stretch(at + width, length)
            stack.append(text.decode() if op in (0x58, 0x8D) else text)
            at += width + length
        elif op == 0x61:  # APPEND
            item = stack.pop()
            _extend(stack[-1], [item])
        elif op == 0x65:  # APPENDS
            added, stack = stack, marks.pop()
            _extend(stack[-1], added)
        elif op == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], [key, value])
        elif op == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            stack.append(named(module, name))
        elif op == 0x63:  # GLOBAL
            middle = data.index(b"\n", at)
            end = data.index(b"\n", middle + 1)
            stack.append(named(data[at:middle].decode(), data[middle + 1 : end].decode()))
            at = end + 1
        elif op == 0x8A:  # LONG1
            length = data[at]
            stack.append(int.from_bytes(stretch(at + 1, length), "little", signed=True))
            at += 1 + length
        elif op == 0x47:  # BINFLOAT
            stack.append(struct.unpack(">d", stretch(at, 8))[0])
            at += 8
        elif op == 0x51:  # BINPERSID
            if not known:
                raise _Unknown("something outside it")
            stack.append(PersistentId(stack.pop()))
        elif op == 0x80:  # PROTO
            at += 1
        elif op == 0x95:  # FRAME
            at += 8
        elif op == 0x2E:  # STOP
            if len(stack) != 1 or marks:
                raise ValueError("more than one value")
            return stack[0]
        else:
            raise CheckpointError(f"{what} is damaged: opcode {op:#x} at byte {at - 1:,} is no part of such a pickle")


def _made(kind: Any, args: Any) -> PickledCall:
    if type(kind) is not GlobalName or type(args) is not tuple:
        raise ValueError("a call of what cannot be called")
    return PickledCall(kind, args)


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise ValueError("something is appended to what is no list")
    target.extend(items)


def _set(target: Any, pairs: list[Any]) -> None:
    if type(target) is PickledCall and target.kind == ("collections", "OrderedDict"):
        target.state = target.state if target.state is not None else {}
        target = target.state
    if type(target) is not dict or len(pairs) % 2:
        raise ValueError("items of what is no dict")
    for key in pairs[::2]:
        if type(key) not in _PLAIN_KEYS:
            raise ValueError("a key that is no plain value")
    target.update(zip(pairs[::2], pairs[1::2], strict=True))
