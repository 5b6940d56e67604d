"""Exports a causal language model of transformers: weights, tokenizer, graph."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.data.packing import split_rows
from paceline.workloads.exporting import Exported, ExportRequest, Graph, Models, Outputs
from paceline.workloads.hf.parts import TransformersPart
from paceline.workloads.hf.spelling import end_of_text, write_tokenizer

MAX_TOKENS = 128  # of each real sample: enough to compare, and quick for a large model too
USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
inputs = tokenizer("A text to continue", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
"""
GRAPH_AXES = {0: "batch", 1: "tokens"}


def first_tokens(request: ExportRequest) -> Tensor:
    """Return the beginning of each real sample, (B, T)."""
    return split_rows(request.batch).inputs_BT[:, :MAX_TOKENS]


def hand_out(
    model: Any, ids_BT: Tensor, wanted_BTV: Tensor, prepared: Mapping[str, Any]
) -> Exported:
    """Return what is handed out: `model` of transformers is to say `wanted_BTV` of these ids."""
    own = prepared.get("hf_folder") if prepared.get("hf_weights") == "load" else None
    end = end_of_text(prepared)
    if end is not None and own is None:
        # A config that was made here has the ids of somebody else's tokenizer.
        for config in (model.config, model.generation_config):
            config.bos_token_id, config.eos_token_id, config.pad_token_id = None, end, None

    def write_beside(folder: Path) -> None:
        write_tokenizer(folder, prepared)

    has_text = end is not None or isinstance(prepared.get("hf_folder"), str)
    remark = "no tokenizer is written: the run's tokens were random numbers, which mean nothing"
    return Exported(
        parts={"": TransformersPart(model)},
        wanted={"logits": wanted_BTV},
        replay=lambda models: _logits(models, ids_BT),
        graphs=lambda models: [_graph(models, ids_BT)],
        write_beside=write_beside,
        library="transformers",
        task="text-generation",
        usage=USAGE,
        remarks=() if has_text else (remark,),
    )


def _logits(models: Models, ids_BT: Tensor) -> Outputs:
    with torch.no_grad():
        return {"logits": models[""](input_ids=ids_BT, use_cache=False).logits}


def _graph(models: Models, ids_BT: Tensor) -> Graph:
    def logits(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return (model(input_ids=ids, attention_mask=mask, use_cache=False).logits,)

    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1:, -3:] = 0  # texts of unequal length: the mask must be in the graph
    return Graph(
        file="model.onnx",
        model=models[""],
        function=logits,
        inputs={"input_ids": ids_BT, "attention_mask": mask_BT},
        outputs=("logits",),
        axes={"input_ids": GRAPH_AXES, "attention_mask": GRAPH_AXES},
    )
