"""Libraries that only some jobs need: imported where they are used, else named with their extra."""

import importlib
from typing import Any

from paceline.errors import ConfigError


def require_extra(name: str, extra: str) -> Any:
    """Import and return a module that `pip install 'paceline[EXTRA]'` brings."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this needs {name.partition('.')[0]}, which cannot be imported: {error}\n"
            f"hint: pip install 'paceline[{extra}]'"
        ) from error
