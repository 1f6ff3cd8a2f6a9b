"""The things that each extension of the project offers, so that they are known by their owner where its folder was
removed.

An entry is a key, the prefix of keys (with a dot at its end), a choice of a config group (GROUP=CHOICE), a config that
`-cn` takes, an option of `scripts/supervise.py`, or a module under its former name.
"""

from __future__ import annotations

_TRACKERS = ("comet", "mlflow", "swanlab", "trackio")
TABLE: dict[str, tuple[str, ...]] = {
    "elastic": ("--elastic", "--hosts_command"),
    "hub": ("hub", "hub.", "training.hub", "training.hub.upload", "training.hub.model_card"),
    "import_config": (),
    "inspection": ("inspect_data",),
    "search": ("plan=search",),
    "trackers": (*(f"logger={name}" for name in _TRACKERS), *(f"training.trackers.{name}" for name in _TRACKERS)),
}
