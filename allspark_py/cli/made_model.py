"""What the commands that quantise say of a model that they made."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allspark.quantize import QuantizedModel


def show_model(made: QuantizedModel, asked_samples: int) -> None:
    """Prints its files. Warns of fewer calibration sequences than were asked for, and names the
    weights that fell back to searched scales."""
    for path in made.paths:
        print(f"{path}: {path.stat().st_size} bytes")
    if 0 < made.num_samples < asked_samples:
        warnings.warn(
            f"the texts have {made.num_samples} sequences; {asked_samples} were asked for",
            stacklevel=2,
        )
    for weight, reason in made.fallbacks.items():
        warnings.warn(f"{weight} has searched scales: {reason}", stacklevel=2)
