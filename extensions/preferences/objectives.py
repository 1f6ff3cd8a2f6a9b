"""The objectives on preferences."""

from __future__ import annotations

from extensions.preferences.cpo import CPO
from extensions.preferences.dpo import DPO
from extensions.preferences.kto import KTO
from extensions.preferences.orpo import ORPO
from extensions.preferences.reward import Reward
from extensions.preferences.simpo import SimPO

OBJECTIVES = (DPO(), ORPO(), SimPO(), CPO(), KTO(), Reward())
