"""The `model` section of the causal_lm workload. Its `data` section is the language model's."""

from typing import Any, Literal

from pydantic import Field

from paceline.config.schema import Section


class CausalLMModel(Section):
    hf: str = Field(
        "llama",
        min_length=1,
        description="A folder, a name on the Hugging Face hub, or an architecture of transformers"
        " such as llama, which has no weights. A folder called llama is ./llama.",
    )
    hf_config: dict[str, Any] = Field(
        {}, description="Keys of the model's own config, over those that it comes with."
    )
    weights: Literal["auto", "load", "random"] = Field(
        "auto", description="auto: load where there are safetensors files, else random."
    )
