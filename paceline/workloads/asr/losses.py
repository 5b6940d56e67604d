"""The losses of a recogniser: cross-entropy, distillation from a teacher, or CTC. All are sums.

Shape letters: B utterances, L tokens, V kinds of tokens, F frames, M mel bins.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.data.spoken import IGNORED
from paceline.workloads.asr.decoding import frame_mask, no_dropout
from paceline.workloads.asr.model import TEACHER
from paceline.workloads.speech_clip.model import num_frames


def whisper_loss(
    model: Any, features_BMF: Tensor, batch: dict[str, Tensor], loss: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss summed over tokens; with a teacher both parts of it, by name."""
    given: dict[str, Any] = {
        "input_features": features_BMF,
        "decoder_input_ids": batch["inputs"],
        "use_cache": False,
    }
    logits_BLV, targets_BL = model(**given).logits, batch["targets"]
    spoken = F.cross_entropy(
        logits_BLV.flatten(0, 1).float(),
        targets_BL.flatten(),
        reduction="sum",
        ignore_index=IGNORED,
        label_smoothing=loss.label_smoothing,
    )
    teacher = getattr(model, TEACHER, None)
    if teacher is None:
        return spoken, {}
    with torch.no_grad():
        told_BLV = no_dropout(teacher)(**given).logits
    taught = distilled(logits_BLV, told_BLV, targets_BL, loss.distill_temperature)
    share = loss.distill_weight
    return share * taught + (1 - share) * spoken, {"spoken": spoken, "taught": taught}


def distilled(student_BLV: Tensor, teacher_BLV: Tensor, targets_BL: Tensor, heat: float) -> Tensor:
    """Return how far the student is from its teacher, both softened by the temperature: the KL
    divergence of each token that has a target, summed, times the temperature's square, which keeps
    its gradient as large as that of the transcript (https://arxiv.org/abs/1503.02531)."""
    asked = targets_BL != IGNORED
    student = (student_BLV.float() / heat).log_softmax(dim=-1)
    teacher = (teacher_BLV.float() / heat).log_softmax(dim=-1)
    apart_BL = (teacher.exp() * (teacher - student)).sum(dim=-1)
    return apart_BL.masked_fill(~asked, 0.0).sum() * heat**2


def hear_frames(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits of every frame, and how many frames each utterance has."""
    waves_BT, num_samples_B = batch["waveforms"], batch["num_samples"]
    mask = frame_mask(num_samples_B, waves_BT.shape[1])
    logits_BFV = model(waves_BT, attention_mask=mask).logits
    return logits_BFV, num_frames(model.config, num_samples_B)


def ctc_loss(model: Any, batch: dict[str, Tensor], blank: int) -> Tensor:
    """Return the loss summed over utterances: minus the log of how likely all spellings are, frame
    by frame, that say the words (https://www.cs.toronto.edu/~graves/icml_2006.pdf)."""
    logits_BFV, num_frames_B = hear_frames(model, batch)
    targets_BL = batch["targets"]
    logs_FBV = logits_BFV.float().log_softmax(dim=-1).transpose(0, 1)
    counts_B = (targets_BL != IGNORED).sum(dim=1)
    return F.ctc_loss(
        logs_FBV,
        targets_BL.clamp(min=0),
        num_frames_B,
        counts_B,
        blank=blank,
        reduction="sum",
    )
