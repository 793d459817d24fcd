"""Exit settings from single command-line options, merged over those of the checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sigma0.config import THRESHOLDS, ExitConfig


def exit_settings(
    options: Mapping[str, Any], default: ExitConfig | None = None, written: str = "--{}"
) -> ExitConfig | None:
    """The options that were given, over the checkpoint's settings unless they name another rule.

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
        # a threshold that only one rule reads selects that rule, unless the checkpoint's rule reads it too
        named = [modes for name in given if len(modes := THRESHOLDS.get(name, ())) == 1 and default.mode not in modes]
        if named:
            given["mode"] = named[0][0]
    if "mode" not in given:
        if default is None:
            # the mode, which decides which of them are read, is not known yet
            replace(ExitConfig(), **{name: value for name, value in given.items() if name != "depth"})
            return None
        given = {**default.to_dict(), **given}
    config = replace(ExitConfig(), **given)
    for name, option in THRESHOLDS.items():
        if options.get(name) is not None and config.mode not in option:
            option_name = written.format(name)
            raise ValueError(
                f"{option_name} has no effect with exit mode '{config.mode}', only with {' or '.join(option)}"
            )
    return config
