"""Exports a masked autoencoder: ViTMAEForPreTraining, and one ONNX graph of it."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.data.images import CENTRE, MEAN, STD, SYNTHETIC, per_channel
from paceline.records.files import write_atomic
from paceline.workloads.exporting import Exported, ExportRequest, Graph, Models, Outputs
from paceline.workloads.hf.parts import TransformersPart

USAGE = """\
from transformers import AutoImageProcessor, ViTMAEForPreTraining

model = ViTMAEForPreTraining.from_pretrained("FOLDER")
processor = AutoImageProcessor.from_pretrained("FOLDER")
outputs = model(**processor(image, return_tensors="pt"))     # image: a PIL image
print(outputs.logits.shape)                                  # patches that it predicts
"""


def export_mae(request: ExportRequest) -> Exported:
    """Hand out encoder and decoder. Which patches are masked follows from `noise`: those with the
    smallest numbers are seen."""
    model: Any = request.model
    pixels_BCHH, noise_BN = request.batch["pixels"], request.batch["order"].float()
    with torch.no_grad():
        logits_BNP, mask_BN = model(pixels_BCHH, request.batch["order"])
    del model.forward  # ours, which has no loss in it; others call the library's own

    def replay(models: Models) -> Outputs:
        with torch.no_grad():
            found = models[""](pixel_values=pixels_BCHH, noise=noise_BN)
        return {"logits": found.logits, "mask": found.mask}

    return Exported(
        parts={"": TransformersPart(model)},
        wanted={"logits": logits_BNP, "mask": mask_BN},
        replay=replay,
        graphs=lambda models: [_graph(models, pixels_BCHH, noise_BN)],
        write_beside=lambda folder: _processor(request.config.data, model.config, folder),
        library="transformers",
        task="image-feature-extraction",
        usage=USAGE,
    )


def _graph(models: Models, pixels_BCHH: Tensor, noise_BN: Tensor) -> Graph:
    def reconstruct(model: Any, pixels: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        found = model(pixel_values=pixels, noise=noise)
        return found.logits, found.mask

    return Graph(
        file="model.onnx",
        model=models[""],
        function=reconstruct,
        inputs={"pixel_values": pixels_BCHH, "noise": noise_BN},
        outputs=("logits", "mask"),
        axes={"pixel_values": {0: "batch"}, "noise": {0: "batch"}},
    )


def _processor(data: Any, known: Any, folder: Path) -> None:
    """Write how an image becomes pixels, as evaluation does it: the middle of it, resized, and each
    channel with mean 0 and spread 1. Random images have no such rule."""
    if data.path_train == SYNTHETIC:
        return
    size, channels = known.image_size, known.num_channels
    body = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "resample": 3,  # bicubic
        "size": {"shortest_edge": round(size / CENTRE)},
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": per_channel("mean", data.mean, MEAN, channels).tolist(),
        "image_std": per_channel("std", data.std, STD, channels).tolist(),
    }
    write_atomic(folder / "preprocessor_config.json", json.dumps(body, indent=2) + "\n")
