"""The `model` and `data` sections of the masked-autoencoder workload."""

from typing import Any

from pydantic import Field

from paceline.config.schema import DataConfig, Positive, Section


class MAEModel(Section):
    hf_config: dict[str, Any] = Field(
        {}, description="Keys of Hugging Face's ViTMAEConfig: model.hf_config.hidden_size=1280."
    )


class MAEData(DataConfig):
    synthetic_samples: Positive = Field(
        256_000, description="Length of the data set of random images, in samples."
    )
