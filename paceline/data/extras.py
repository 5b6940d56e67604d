"""Libraries that only some jobs need: imported when used; the error names the extra to install."""

import importlib
import logging
from typing import Any

from paceline.errors import ConfigError


def require_extra(name: str, extra: str) -> Any:
    """Import and return a module that `pip install 'paceline[EXTRA]'` brings."""
    _hush_torchao()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this needs {name.partition('.')[0]}, which cannot be imported: {error}\n"
            f"hint: pip install 'paceline[{extra}]'"
        ) from error


def _hush_torchao() -> None:
    """Keep torchao's own warnings off the console: transformers loads it wherever it is installed,
    and it warns about each compiled part that is for another torch, and about how it calls
    torch."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_enum)


def _is_no_enum(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()
