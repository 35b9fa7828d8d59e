"""Families of published models: their settings, and the layouts of their weights.

One table per family describes both directions of the conversion between a Hugging Face folder and this project's model
(diptych.plans.families.folder). Layers of the model know no family: every feature is a setting of TransformerConfig.
"""

from collections.abc import Mapping
from typing import Any

from diptych.plans.families.family import Family, FamilyError
from diptych.plans.families.kimi import KIMI_LINEAR
from diptych.plans.families.llama import LLAMA
from diptych.plans.families.olmo import OLMO_HYBRID
from diptych.plans.families.qwen import QWEN3_5, QWEN3_NEXT
from diptych.plans.text_files import one_line

FAMILIES = {family.name: family for family in (QWEN3_5, QWEN3_NEXT, OLMO_HYBRID, KIMI_LINEAR, LLAMA)}
"""All families by name."""


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of the content of config.json.

    Raises:
        FamilyError: no family has its model_type, or the model also has parts for images, video or sound.
    """
    kind = config.get("model_type")
    found = next((family for family in FAMILIES.values() if kind in family.model_types), None)
    if found is not None:
        return found
    parts = sorted(key for key in config if key.endswith("_config") and key != "text_config")
    if "text_config" in config and parts:
        raise FamilyError(
            f"config.json: expected a language model alone, got {kind!r} with {', '.join(parts)}; towers for images, "
            "video and sound are not implemented: save the language model alone (AutoModelForCausalLM)"
        )
    known = ", ".join(name for family in FAMILIES.values() for name in family.model_types)
    raise FamilyError(f"config.json, model_type: expected one of {known}, got {one_line(kind)}")
