"""The masked autoencoder: transformers' own numbers, first values, FLOPs as torch counts them."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from paceline.data.synthetic import RandomImages
from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.plan.policy import effective_config
from paceline.strategies.weights import fill_weights
from paceline.workloads.mae.model import build_mae, flops_per_sample, init_mae_module, mae_config
from paceline.workloads.mae.workload import MaskedAutoencoder
from tests.machines import plan
from tests.skips import needs_torchao

pytest.importorskip("transformers")

TINY = load_job("mae_tiny", []).config.model.hf_config  # type: ignore[attr-defined]


def build(given: dict[str, Any] = TINY, impl: str = "sdpa") -> Any:
    with torch.device("meta"):
        model = build_mae(given, impl)
    fill_weights(model, lambda n, m: init_mae_module(model, n, m), 0, torch.device("cpu"))
    return model


def theirs() -> Any:
    """The same model as transformers builds it, with the two initialisers that its constructor
    skips or undoes called by hand."""
    from transformers import ViTMAEForPreTraining

    model = ViTMAEForPreTraining(mae_config(TINY))
    embeddings = model.vit.embeddings
    embeddings.patch_embeddings.projection._is_hf_initialized = False
    with torch.no_grad():
        embeddings.initialize_weights()
        model.decoder.initialize_weights(embeddings.patch_embeddings.num_patches)
    return model


def batch(num: int = 3) -> dict[str, torch.Tensor]:
    return RandomImages(64, (1, 32, 32), 16, 0).batch(range(num))


def test_first_values_are_those_of_transformers() -> None:
    ours, reference = build(), theirs()
    expected = dict(reference.named_parameters())
    assert set(expected) == {name for name, _ in ours.named_parameters()}
    for name, weight in ours.named_parameters():
        wanted = expected[name]
        assert torch.isfinite(weight).all() and weight.requires_grad == wanted.requires_grad, name
        if name.endswith(("position_embeddings", "pos_embed", "bias")) or "norm" in name:
            assert torch.equal(weight, wanted), name
        else:
            # 6 standard errors of a standard deviation from n numbers, on both sides.
            margin = 12 / (2 * weight.numel()) ** 0.5
            assert weight.std().item() == pytest.approx(wanted.std().item(), rel=margin), name
            assert weight.abs().max() > 0, name


def test_positions_differ_and_the_class_token_has_none() -> None:
    table = build().vit.embeddings.position_embeddings[0]
    assert torch.equal(table[0], torch.zeros(64))
    assert len({tuple(row.tolist()) for row in table}) == 17


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_loss_is_the_mean_of_transformers_times_samples(impl: str, norm_pix_loss: bool) -> None:
    model = build(TINY | {"norm_pix_loss": norm_pix_loss}, impl)
    samples = batch()
    found, count = MaskedAutoencoder().loss(model, samples)
    theirs = type(model).forward(model, samples["pixels"], noise=samples["order"].float())
    assert count == 3
    assert found.item() / 3 == pytest.approx(theirs.loss.item(), rel=1e-6)


def test_images_depend_on_seed_and_index_alone() -> None:
    data = RandomImages(64, (1, 32, 32), 16, seed=1)
    again = RandomImages(64, (1, 32, 32), 16, seed=1)
    assert torch.equal(data.batch([5, 9])["pixels"][1], again[9]["pixels"])
    assert torch.equal(data.batch([5, 9])["order"][0], again[5]["order"])
    other = RandomImages(64, (1, 32, 32), 16, seed=2)
    assert not torch.equal(data[5]["pixels"], data[6]["pixels"])
    assert not torch.equal(data[5]["pixels"], other[5]["pixels"])
    assert data.fingerprint != other.fingerprint
    pixels = data.batch(range(64))["pixels"]
    assert pixels.dtype == torch.float32 and pixels.std().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", ["mae_tiny", "mae_stub"])
def test_flops_agree_with_torch(name: str) -> None:
    job = load_job(name, [])
    config = effective_config(job.config, "sdpa")
    known = mae_config(config.model.hf_config)  # type: ignore[attr-defined]
    side = known.image_size
    with torch.device("meta"):
        model = job.workload.build_model(config)
        samples = {
            "pixels": torch.empty(2, 1, side, side),
            "order": torch.empty(2, (side // known.patch_size) ** 2, dtype=torch.long),
        }
        # The counter sees attention only where it is spelt out as matrix products.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            job.workload.loss(model, samples)[0].backward()
    assert flops_per_sample(known) == counter.get_total_flops() / 2


def test_the_stub_is_the_model_of_the_issue() -> None:
    made = plan(source="mae_stub")
    assert made.model.num_trainable + made.model.num_frozen == 710_560_256
    # 226 x 1280 and 226 x 512 fixed positions.
    assert made.model.num_frozen == 226 * (1280 + 512)
    # Forward 109.98 GF: 9.44 patch embedding, 72.25 encoder, 0.07 between, 24.43 decoder, 3.79
    # prediction. Backward twice that, less 9.44 for the pixels, whose gradient nobody needs.
    assert made.flops_per_sample.value == pytest.approx(320.5e9, rel=1e-3)


@pytest.mark.parametrize(
    ("override", "where", "hint"),
    [
        ("model.hf_config.hiden_size=64", "hf_config.hiden_size", "hidden_size"),
        ("model.hf_config.dtype=bfloat16", "hf_config.dtype", "take it out"),
        ("model.hf_config.image_size=30", "hf_config.image_size", "multiple of patch_size"),
        ("model.hf_config.mask_ratio=0.99", "hf_config.mask_ratio", "some patches must be seen"),
        ("model.hf_config.num_attention_heads=5", "hf_config.hidden_size", "number of heads"),
    ],
)
def test_a_wrong_key_is_a_finding(override: str, where: str, hint: str) -> None:
    problems = plan(override, source="mae_tiny").problems()
    assert len(problems) == 1
    assert problems[0].where == f"model.{where}" and hint in problems[0].hint


def test_a_wrong_value_is_refused_with_all_problems() -> None:
    with pytest.raises(ConfigError, match="expected int") as caught:
        plan("model.hf_config.hidden_size=wide", "model.hf_config.hed=1", source="mae_tiny")
    assert "has no key hed" in str(caught.value)


def test_images_that_are_not_square_are_refused() -> None:
    with pytest.raises(ConfigError, match="square here"):
        plan("model.hf_config.image_size=[32,16]", source="mae_tiny")


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[hf\]'"):
        plan(source="mae_tiny")


@needs_torchao
@pytest.mark.slow  # imports transformers in a process of its own
def test_torchao_says_nothing_where_transformers_loads_it() -> None:
    """Its compiled parts for another torch are none of a user's business."""
    code = "from paceline.workloads.hf.model import require_extra as e; e().AutoModelForPreTraining"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
