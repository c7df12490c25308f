"""State trees as JSON, without loss: 1 stays an int, 1.0 a float, a tuple a tuple, nan stays nan.

Numbers, strings, true, false and null are themselves. Any other value is an object with one key, its type.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from shardwise.checkpoint.archive.state_tree import MAX_DEPTH, Node, NodeKind
from shardwise.errors import CheckpointError

JSON_LEVELS = 3  # of JSON for each container of a state: {"dict": [[key, value]]}
PLAIN_INT = 2**63  # larger ones confuse many readers of JSON


def encode_tree(node: Node, tensor_name: Callable[[Node], str]) -> Any:
    """A tree as JSON values, with tensors by name."""
    node = node.content
    if node.kind is NodeKind.TENSOR:
        return {"tensor": tensor_name(node)}
    if node.kind is NodeKind.VALUE:
        return encode_value(node.value)
    inner = [encode_tree(child, tensor_name) for child in node.children.values()]
    if node.kind is NodeKind.DICT:
        return {"dict": [list(pair) for pair in zip(map(encode_value, node.children), inner, strict=True)]}
    return {node.kind.value: inner}


def encode_value(value: Any) -> Any:
    """A plain value as JSON values."""
    if type(value) is int and not -PLAIN_INT <= value < PLAIN_INT:
        return {"int": hex(value)}
    if type(value) is float and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if isinstance(value, complex):
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: base64.b64encode(value).decode()}
    return value


def decode_tree(words: Any, tensors: Mapping[str, Any]) -> Any:
    """The decoded state, with ``tensors`` by name; raises where the JSON is no encoded state."""
    if _is_deeper(words, JSON_LEVELS * MAX_DEPTH):
        raise CheckpointError(f"its values are nested deeper than {MAX_DEPTH}")
    return _decode(words, tensors)


def _is_deeper(words: Any, most: int) -> bool:
    """Whether containers are nested more than ``most`` deep."""
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
