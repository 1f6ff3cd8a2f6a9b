"""The objectives on labels."""

from __future__ import annotations

from extensions.classification.documents import Classification
from extensions.classification.steps import ProcessReward
from extensions.classification.tokens import TokenClassification

OBJECTIVES = (Classification(), ProcessReward(), TokenClassification())
