"""Suggestions for words that were mistyped: commands, options and choices."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question with the known word that is nearest; else the words there are."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1)
    return f"did you mean '{near[0]}'?" if near else f"there are {', '.join(words)}"


def one_of(known: Sequence[str], what: str) -> Callable[[str], str]:
    """The type of an option with choices; its error suggests one."""

    def parse(text: str) -> str:
        if text in known:
            return text
        raise argparse.ArgumentTypeError(f"'{text}' is no {what}: {did_you_mean(text, known)}")

    return parse


def require_known_words(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], words: Sequence[str]
) -> None:
    """End with an error that suggests a word, where the command or an option is unknown.

    argparse would first complain of arguments that it misses because of such an option.
    """
    before = list(takewhile(lambda word: word.startswith("-"), words))
    _require_known_options(parser, before)
    if len(before) == len(words):
        return  # --help, or no command: argparse says so
    name, rest = words[len(before)], words[len(before) + 1 :]
    if name not in commands:
        parser.error(f"there is no command '{name}': {did_you_mean(name, commands)}")
    _require_known_options(commands[name], list(takewhile(lambda word: word != "--", rest)))


def _require_known_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    known = [name for name in parser._option_string_actions if name.startswith("--")]  # nothing public lists them
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and " " not in name and not any(option.startswith(name) for option in known):
            parser.error(f"there is no option '{name}': {did_you_mean(name, known)}")
