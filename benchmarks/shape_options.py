"""The options of benchmarks whose model is like Llama: a backend, and what changes the model that suits the backend."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

from benchmarks.llama import Shape

S = TypeVar("S", bound=Shape)


def parser_for(description: str | None, shapes: Mapping[str, Shape]) -> argparse.ArgumentParser:
    """A parser with `--backend`, and an option for each number of the backend's shape."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=tuple(shapes), default="gloo")
    for field in fields(shapes["gloo"]):
        numbers = ", ".join(f"{getattr(shape, field.name)} on {backend}" for backend, shape in shapes.items())
        parser.add_argument(f"--{field.name}", type=int, help=f"by default {numbers}")
    return parser


def chosen_shape(given: argparse.Namespace, shapes: Mapping[str, S]) -> S:
    """The shape of the backend that was chosen, with the numbers that were given."""
    default = shapes[given.backend]
    numbers = {field.name: getattr(given, field.name) for field in fields(default)}
    return replace(default, **{name: number for name, number in numbers.items() if number is not None})
