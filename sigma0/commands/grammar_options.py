"""Options that say what an answer has to be."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sigma0.decode.grammar.spec import parse_spec


def grammar_settings(
    schema: str | None, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> dict[str, Any]:
    """Keyword arguments of `sigma0.stream` for the options that were given; checked as far as no model is needed.

    Args:
        schema: A JSON Schema, or the name of a file with one.
        regex: A regular expression.
        choice: Texts.
        grammar: A grammar, or the name of a file with one.

    Raises:
        ValueError: For two of them, a file that cannot be read, or a text that is no JSON.
    """
    if schema is not None and not schema.lstrip().startswith(("{", "true", "false")):
        schema = _content("--schema", schema)
    # a grammar has some rule, and a file name has none
    if grammar is not None and ":" not in grammar:
        grammar = _content("--grammar", grammar)
    given = {"schema": schema, "regex": regex, "choice": choice or None, "grammar": grammar}
    parse_spec(**given)  # type: ignore[arg-type]
    return {name: value for name, value in given.items() if value is not None}


def _content(option: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} is neither what it names nor a file that can be read: {error}") from error
