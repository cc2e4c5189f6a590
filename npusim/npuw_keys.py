"""Which configuration keys NPUW and its devices know: others are dropped by OpenVINO without a word."""

import difflib
from collections.abc import Mapping

import openvino as ov

from npusim.config_values import ConfigValue, spell
from npusim.errors import ConfigError
from npusim.npuw_config import SHARED_KEYS

_ANSWERED_LATER = ("NPUW_", "NPU_", "NPUSIM_")
"""NPUW refuses its own that it does not know, `read_config` those of the simulator, with their reason."""

_READ_ONLY = "RO"


def check_keys(config: Mapping[str, ConfigValue]) -> None:
    """ConfigError, naming the nearest known one, for a key of which neither NPUW nor a device knows."""
    core = ov.Core()
    known = set(SHARED_KEYS)
    for device in ("CPU", "NPU"):
        properties = core.get_property(device, "SUPPORTED_PROPERTIES")
        known |= {name for name, access in properties.items() if access != _READ_ONLY}
    for key, value in config.items():
        if key in known or key.startswith(_ANSWERED_LATER) or _cpu_takes(core, key, value):
            continue
        raise ConfigError(f"unknown config key {key!r}; the nearest known one is {_nearest(key, known)}")


def _cpu_takes(core: ov.Core, key: str, value: ConfigValue) -> bool:
    """Whether it is a property that the CPU device, loaded before, takes but does not list."""
    try:
        core.set_property("CPU", {key: spell(value)})
    except RuntimeError:
        return False
    return True


def _nearest(key: str, known: set[str]) -> str:
    spelled = key.upper()
    if spelled.startswith(_ANSWERED_LATER):
        known = known | {spelled}
    return difflib.get_close_matches(spelled, sorted(known), n=1, cutoff=0.0)[0]
