"""How many tokens a sequence may have, by the model's positions."""

from __future__ import annotations

from typing import Any

from shardwright.errors import InputError


def check_positions(config: Any, sequence: int) -> str | None:
    """A warning where ``sequence`` tokens are more than a model with rotary positions is stated to know, or None.

    Raises InputError where positions are rows of a table, which has none for those beyond its end.
    """
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1 or sequence <= stated:  # XLNet states -1: no limit
        return None
    field = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if getattr(text, "rope_parameters", None) is None:
        raise InputError(
            f"sequence: found {sequence}; allowed: at most {stated}, the positions of the model ({field} of its config)"
        )
    return (
        f"sequence: {sequence} tokens are more than the {stated} that the model's config states ({field}): rotary "
        "positions beyond them go on, but the model may not have learned them"
    )
