"""The parser of every subcommand: what is wrong is said with the subcommand's own usage, and what to write instead."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from lowshard.command_examples import examples_text
from lowshard.nearest import nearest

__all__ = ["CommandParser", "expect_habits"]


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` that knows what people are used to write elsewhere; subparsers are of its class too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.suggest_on_error = False  # Python 3.15 makes a suggestion of its own
        self.habits: dict[str, str] = {}
        self._options: list[str] = []

    def parse_known_args(  # type: ignore[override]  # as argparse's; its overloads are about the namespace's class
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments; those that are not known end the program here, where their command is known."""
        given = sys.argv[1:] if args is None else args
        self._options = list(takewhile(lambda word: not word.endswith(".py"), given))
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._advice(unknown)}")
        return found, []

    def format_help(self) -> str:
        """Return the help, with lines to try at its end."""
        return super().format_help() + examples_text(self.prog)

    def error(self, message: str) -> NoReturn:
        """Print this command's usage, what is wrong and what to write instead, and exit with code 2."""
        if "arguments are required" in message:  # said before the unknown ones are
            message += self._advice(word for word in self._options if word.partition("=")[0] in self.habits)
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(value, map(str, action.choices or ()))
            raise

    def _advice(self, unknown: Iterable[str]) -> str:
        """Return lines that say, for each option that is not known, what to write instead."""
        # The dashes, which all have, would make any two alike.
        known = [name[2:] for action in self._actions for name in action.option_strings if len(name) > 2]
        lines = []
        for word in unknown:
            option = word.partition("=")[0]
            if not option.startswith("-") or option in ("-", "--"):
                continue
            # Short options may have their value behind them: -g2.
            habit = self.habits.get(option) or (None if option[1] == "-" else self.habits.get(option[:2]))
            if habit is not None:
                lines.append(f"  {option}: {habit}")
            elif near := nearest(option.lstrip("-"), known, before="--"):
                lines.append(f"  {option}{near}")
        return "".join(f"\n{line}" for line in lines)


def expect_habits(parser: argparse.ArgumentParser, habits: Mapping[str, str]) -> None:
    """Have a parser say what to write in place of options that other programs have."""
    if isinstance(parser, CommandParser):
        parser.habits.update(habits)
