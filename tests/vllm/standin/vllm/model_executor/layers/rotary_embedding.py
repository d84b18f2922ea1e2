from typing import Any

_ROPE_DICT: dict[tuple, Any] = {}
