"""Trees as JSON, so that what is read is what was written: 1 stays an int, 1.0 a float, a tuple a tuple, nan itself.

Numbers, strings, true, false and null stand for themselves; whatever JSON does not know is an object with one key that
says what it is.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from shardwise.archive.nest import MOST_DEEP, Kind, Node
from shardwise.errors import CheckpointError

WORDS_EACH = 3  # containers of JSON for one of ours: {"dict": [[key, value]]}
PLAIN_INT = 2**63  # beyond, many readers of JSON go wrong


def encode(node: Node, tensor_name: Callable[[Node], str]) -> Any:
    """A tree in words of JSON; tensors by their names."""
    node = node.content
    if node.kind is Kind.TENSOR:
        return {"tensor": tensor_name(node)}
    if node.kind is Kind.VALUE:
        return encode_value(node.own)
    inner = [encode(child, tensor_name) for child in node.children.values()]
    if node.kind is Kind.DICT:
        return {"dict": [list(pair) for pair in zip(map(encode_value, node.children), inner, strict=True)]}
    return {node.kind.value: inner}


def encode_value(value: Any) -> Any:
    """A plain value in words of JSON."""
    if type(value) is int and not -PLAIN_INT <= value < PLAIN_INT:
        return {"int": hex(value)}
    if type(value) is float and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if isinstance(value, complex):
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: base64.b64encode(value).decode()}
    return value


def decode(words: Any, tensors: Mapping[str, Any]) -> Any:
    """What was encoded, with what the names stand for; a `CheckpointError` where nobody could have encoded it."""
    if _is_deeper(words, WORDS_EACH * MOST_DEEP):
        raise CheckpointError(f"its values are nested deeper than {MOST_DEEP}")
    return _decode(words, tensors)


def _is_deeper(words: Any, most: int) -> bool:
    """Whether containers are in each other more often than so."""
    level = [words] if isinstance(words, dict | list) else []
    for _ in range(most):
        inner = chain.from_iterable(one.values() if isinstance(one, dict) else one for one in level)
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            return False
    return bool(level)


def _decode(words: Any, tensors: Mapping[str, Any]) -> Any:
    if words is None or isinstance(words, bool | int | float | str):
        return words
    if isinstance(words, dict) and len(words) == 1:
        ((kind, inner),) = words.items()
        decoder = _DECODERS.get(kind)
        if decoder is not None and isinstance(inner, list if kind in ("dict", "list", "tuple") else str):
            try:
                return decoder(inner, tensors)
            except (TypeError, ValueError, KeyError, struct.error) as error:
                raise CheckpointError(f"{words!r:.100} is not a {kind}: {error!r:.100}") from error
    raise CheckpointError(f"{words!r:.100} stands for no value")


def _decode_dict(pairs: Any, tensors: Mapping[str, Any]) -> dict[Any, Any]:
    made = {_decode(key, {}): _decode(inner, tensors) for key, inner in pairs}
    if len(made) < len(pairs) or not all(type(key) in (str, int) for key in made):
        raise ValueError("keys are str or int, each once")
    return made


_DECODERS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "dict": _decode_dict,
    "list": lambda inner, tensors: [_decode(words, tensors) for words in inner],
    "tuple": lambda inner, tensors: tuple(_decode(words, tensors) for words in inner),
    "tensor": lambda name, tensors: tensors[name],
    "int": lambda text, _: int(text, 16),
    "float": lambda bits, _: struct.unpack(">d", bytes.fromhex(bits))[0],
    "complex": lambda bits, _: complex(*struct.unpack(">dd", bytes.fromhex(bits))),
    "bytes": lambda text, _: base64.b64decode(text, validate=True),
    "bytearray": lambda text, _: bytearray(base64.b64decode(text, validate=True)),
}
