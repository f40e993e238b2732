"""One declaration per run option: its flag, help, wording, FlexGen argument and table column all come from here.

A field of `settings.RunSettings` declares itself with `Annotated[type, Option(...)]`; everything below reads that.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from helpers.errors import Refused


@dataclass(frozen=True)
class Option:
    """A field's user interface. `words` describes a value other than the default, `{}` standing for the value."""

    flag: str
    help: str
    words: str = ""
    flexgen: bool = True  # one of FlexGen's own flags, not an addition of this lab
    always: bool = False  # part of every command line, even at its default


@dataclass(frozen=True)
class Declared:
    """An option together with the field that declares it; `path` leads there from the outermost type."""

    option: Option
    path: tuple[str, ...]
    field: FieldInfo

    @property
    def name(self) -> str:
        """The field's name; a table's column has the same."""
        return self.path[-1]

    @property
    def type(self) -> Any:
        """The type of a value; the first of a union."""
        annotation = self.field.annotation
        if typing.get_origin(annotation) in (None, Literal):
            return annotation
        return typing.get_args(annotation)[0]

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.type)

    @property
    def takes_words(self) -> bool:
        """Whether a value is several words, as `--percent`'s six numbers are."""
        return hasattr(self.type, "parse")

    def value_in(self, settings: BaseModel) -> Any:
        found: Any = settings
        for name in self.path:
            found = getattr(found, name)
        return found

    def is_default_in(self, settings: BaseModel) -> bool:
        return not self.field.is_required() and self.value_in(settings) == self.field.default

    def arguments(self, settings: BaseModel) -> list[str]:
        """The flag and its value, as typed on a command line."""
        value = self.value_in(settings)
        if value is True and self.field.default is False:
            return [self.option.flag]
        return [self.option.flag, *(str(value).lower() if isinstance(value, bool) else str(value)).split(" ")]

    def parse(self, text: str) -> Any:
        """Parse `text` as this option's value. Raises Refused naming the flag, the text and the rule."""
        rules = {int: "not a whole number", float: "not a number", bool: "neither true nor false"}
        if self.takes_words:
            return self.type.parse(text)
        try:
            if self.choices:
                return {choice.lower(): choice for choice in self.choices}[text.strip().lower()]
            if self.type is bool:
                return flexgen_bool(text)
            return self.type(text)
        except (KeyError, ValueError):
            rule = f"choose {' or '.join(self.choices)}" if self.choices else rules[self.type]
            raise Refused(f"{self.option.flag} {text}: {rule}") from None


def flexgen_bool(text: str) -> bool:
    """FlexGen's `str2bool`. Raises KeyError for anything else."""
    yes, no = dict.fromkeys(("yes", "true", "t", "y", "1"), True), dict.fromkeys(("no", "false", "f", "n", "0"), False)
    return (yes | no)[text.strip().lower()]


@cache
def declared(of: type[BaseModel], path: tuple[str, ...] = ()) -> tuple[Declared, ...]:
    """The options of a settings type in the order of its fields, those of a nested type in its place."""
    found: list[Declared] = []
    for name, field in of.model_fields.items():
        options = [one for one in field.metadata if isinstance(one, Option)]
        if options:
            found.append(Declared(options[0], (*path, name), field))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += declared(field.annotation, (*path, name))
    return tuple(found)


def columns(settings: BaseModel) -> dict[str, Any]:
    """Every option's value by its column name."""
    return {one.name: one.value_in(settings) for one in declared(type(settings))}


def words(settings: BaseModel) -> tuple[str, ...]:
    """The options that are not at their defaults, in words."""
    return tuple(
        one.option.words.format(one.value_in(settings))
        for one in declared(type(settings))
        if one.option.words and not one.is_default_in(settings)
    )


# ---- the command line


def add_arguments(
    parser: argparse.ArgumentParser, of: type[BaseModel], *names: str, defaults: Mapping[str, str] | None = None
) -> None:
    """Add the named options of a settings type to a parser; `defaults` tells the help of those that depend on the
    device. Values stay text until `given` reads them."""
    for one in (one for one in declared(of) if one.name in names):
        shown = (defaults or {}).get(one.name, "") if one.option.always else one.field.default
        takes: dict[str, Any] = {"metavar": "|".join(one.choices) or one.name.rpartition("_")[2].upper()}
        if one.takes_words:
            takes = {"nargs": "+", "action": "append", "metavar": "N"}
            shown = ""
        elif one.type is bool:
            takes = {"nargs": "?", "const": "true", "metavar": "BOOL"}
        text = one.option.help + (
            f" (default: {str(shown).lower() if isinstance(shown, bool) else shown})"
            if shown not in ("", None, False)
            else ""
        )
        parser.add_argument(one.option.flag, dest=one.name, help=text.replace("%", "%%"), **takes)


def given(arguments: argparse.Namespace, of: type[BaseModel]) -> list[dict[str, Any]]:
    """The option values that were typed, one mapping per run: comma-separated values and repeated `--percent` make
    a sweep over every combination. Raises Refused."""
    values = {}
    for one in declared(of):
        typed = getattr(arguments, one.name, None)
        if typed is None:
            continue
        if one.takes_words:  # each --percent: six words, or quoted splits of six numbers each
            texts = [text for words in typed for text in (words if " " in words[0].strip() else [" ".join(words)])]
        else:
            texts = (
                typed.split(",") if isinstance(typed, str) else ["--"]
            )  # argparse makes an empty list of `--model=--`
        values[one.name] = [one.parse(text) for text in texts]
    return [dict(zip(values, combination)) for combination in product(*values.values())]
