"""Where models and all that belongs to them are kept: asked for long before a store is needed."""

from __future__ import annotations

import os
from pathlib import Path


def default_home() -> Path:
    """``TOQUE_HOME``, or the user's data folder."""
    home = os.environ.get("TOQUE_HOME")
    return Path(home).expanduser() if home else Path.home() / ".local" / "share" / "toque"
