"""Where the Countdown model lies that ships with the package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def bundled_model() -> Path:
    """Directory of the bundled model: in the installed package, or in the source checkout."""
    places = _PACKAGE / "bundled" / "countdown", _PACKAGE.parent / "checkpoints" / "countdown"
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise FileNotFoundError(
        f"the bundled model is in neither {places[0]} nor {places[1]}; reinstall, or name a model"
    )
