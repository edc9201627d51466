"""Helpers to build the terms and rewards of a config: imports, and errors with a place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TypeVar

from steelyard.errors import ConfigError, RegistryError, SpecError, SteelyardError
from steelyard.experiment.config import Config
from steelyard.experiment.secrets import redact
from steelyard.spec import describe_with_place

T = TypeVar("T")


def import_modules(config: Config) -> None:
    """Import the modules that a config lists, from the folders that it lists.

    Raises:
        ConfigError: one is none.
    """
    sys.path[:0] = [folder for folder in config.python_path if folder not in sys.path]
    for module in config.imports:
        try:
            importlib.import_module(module)
        except SteelyardError:
            raise
        except ImportError as error:
            raise ConfigError(
                f"imports must be modules, and {module!r} is none: {error}"
            ) from error
        except Exception as error:  # a module is anybody's code
            raise ConfigError(
                redact(f"imports: {module!r} cannot be imported: {describe_with_place(error)}.")
            ) from error


def locate_errors(location: str, build_part: Callable[[], T]) -> T:
    """Call a function, and add the place in the config to its errors.

    Raises:
        ConfigError: the function raised an error of the config, the registry or a spec.
    """
    try:
        return build_part()
    except RegistryError as error:
        raise ConfigError(redact(f"{location}: use: {error}")) from error
    except (ConfigError, SpecError) as error:
        raise ConfigError(redact(f"{location}: {error}")) from error
