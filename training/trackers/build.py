"""From the key `logger` to trackers."""

from __future__ import annotations

from importlib.util import find_spec

from data.components import build_checked_component
from errors import UserError
from training.config.schema import LoggerConfig
from training.trackers.tracker import METHODS, Tracker


def build_trackers(config: LoggerConfig) -> dict[str, Tracker]:
    """Build the trackers of `logger=[NAME, ...]` by name; none of them is started. Raises UserError for one that is not
    a tracker, or whose package is missing."""
    fits = lambda built: all(callable(getattr(built, name, None)) for name in METHODS)  # noqa: E731
    need = "a class with the methods of training.trackers.tracker.Tracker"
    built: dict[str, Tracker] = {}
    for name, spec in config.trackers.items():
        key = f"logger.trackers.{name}"
        built[name] = build_checked_component(spec, key, example="my_trackers.MyTracker", fits=fits, need=need)
        package = getattr(built[name], "package", None)
        if package is not None and find_spec(package) is None:
            raise UserError(f"logger={name} needs the package {package} (pip install {package}), or use none")
    return built
