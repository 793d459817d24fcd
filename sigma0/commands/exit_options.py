"""Exit settings out of single options that somebody gave, over those of the checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sigma0.config import THRESHOLDS, ExitConfig


def exit_settings(
    options: Mapping[str, Any], default: ExitConfig | None = None, written: str = "--{}"
) -> ExitConfig | None:
    """The options that were given, over the checkpoint's own settings where they name no other rule.

    Args:
        options: Fields of `ExitConfig`, None where not given.
        default: The checkpoint's settings, once they are known.
        written: How the caller writes an option's name.

    Raises:
        ValueError: For bad values.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return default
    if "mode" not in given and default is not None:
        # a threshold that one rule alone reads names that rule, where the checkpoint's own does not read it
        named = [modes for name in given if len(modes := THRESHOLDS.get(name, ())) == 1 and default.mode not in modes]
        if named:
            given["mode"] = named[0][0]
    if "mode" not in given:
        if default is None:
            # of the mode that decides which of them are read, nothing is known yet
            replace(ExitConfig(), **{name: value for name, value in given.items() if name != "depth"})
            return None
        given = {**default.to_dict(), **given}
    config = replace(ExitConfig(), **given)
    for name, option in THRESHOLDS.items():
        if options.get(name) is not None and config.mode not in option:
            told = written.format(name)
            raise ValueError(f"{told} has no effect with exit mode '{config.mode}', only with {' or '.join(option)}")
    return config
