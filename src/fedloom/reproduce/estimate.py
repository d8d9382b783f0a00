"""How long a recipe takes here: counted steps times measured seconds per step."""

from __future__ import annotations
