"""Command-line options made from the fields of ``EngineConfig``, so that name, default and help are in one place."""

import dataclasses
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import click

from loongserve.runtime.config import EngineConfig, OptionValue

Command = TypeVar("Command", bound=Callable[..., Any])


def engine_options(command: Command) -> Command:
    """Give a command an argument MODEL and an option for each other field of ``EngineConfig``."""
    types = get_type_hints(EngineConfig)
    for field in reversed(dataclasses.fields(EngineConfig)):
        if field.name == "model":
            command = click.argument("model", required=False)(command)
        elif field.name == "policy_options":
            command = click.option(
                "--policy-option",
                "policy_options",
                multiple=True,
                metavar="KEY=VALUE",
                callback=_read_policy_options,
                help=field.metadata["help"],
            )(command)
        else:
            command = _option(field, types[field.name])(command)
    return command


def read_config(values: Mapping[str, Any]) -> EngineConfig:
    """Make a checked configuration of a command's parameters.

    Raises:
        click.UsageError: a value is out of its range, or a parameter is no field.
    """
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise click.UsageError(f"unknown settings: {', '.join(unknown)}")
    config = EngineConfig(**{**values, "policy_options": tuple(values.get("policy_options", ()))})
    try:
        config.validate()
    except ValueError as error:
        raise click.UsageError(_as_options(str(error), known)) from error
    return config


def _option(field: "dataclasses.Field[Any]", hint: Any) -> Callable[[Command], Command]:
    choices, unit = field.metadata["choices"], field.metadata["unit"]
    plain = next((part for part in get_args(hint) if part is not NoneType), hint)
    return click.option(
        "--" + field.name.replace("_", "-"),
        field.name,
        default=field.default,
        show_default=field.default is not None,
        type=click.Choice(choices) if choices else plain,
        metavar=unit.upper() if unit and not choices else None,
        help=field.metadata["help"],
    )


def _as_options(message: str, names: set[str]) -> str:
    """Name the option in front of a message as it is typed."""
    name, colon, rest = message.partition(":")
    if colon and name in names:
        return f"{'MODEL' if name == 'model' else '--' + name.replace('_', '-')}:{rest}"
    return message


def _read_policy_options(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[str, OptionValue], ...]:
    pairs = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"expected KEY=VALUE, got {text!r}", ctx, param)
        pairs.append((key.replace("-", "_"), _read_value(value)))
    return tuple(pairs)


def _read_value(text: str) -> OptionValue:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
