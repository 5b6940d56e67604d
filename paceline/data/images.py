"""Images for training and evaluation: read, decoded, cropped and normalised in loader workers.

    data = Images(config.data, split, size=224, seed=config.train.seed)
    data[5]                                {"pixels": (C, 224, 224), "label": 3}

A training crop is drawn from (seed, position): the same on any number of ranks and loaders, and
another one in every epoch. pillow is an extra, and torch is imported when a sample is made.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from paceline.config.schema import DataConfig
from paceline.config.section import Count
from paceline.data.extras import require_extra
from paceline.data.image_index import ImageIndex, ImageQuery, keep_index
from paceline.data.image_sources import Columns
from paceline.errors import ConfigError, DataError

SYNTHETIC = "synthetic"
MODES = {1: "L", 3: "RGB"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's images
CENTRE = 0.875  # of the shorter side is seen in evaluation, as 224 of 256 pixels
RATIOS = (3 / 4, 4 / 3)  # widths over heights of training crops
TRIES = 10
MAX_PIXELS = 1 << 28
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
Share = Annotated[float, Field(gt=0, le=1)]
Split = Literal["train", "val"]
Box = tuple[float, float, float, float]


class ImageData(DataConfig):
    """The `data` section of workloads that read images."""

    path_train: str = Field(
        SYNTHETIC,
        description="Images to train on: a folder of them, of .tar (WebDataset) or .parquet files,"
        " one such file, or a .csv that lists them. synthetic: random ones.",
    )
    path_eval: str = Field(
        "auto", description="Images for validation. auto: val_fraction of path_train."
    )
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.02, description="Share of path_train kept apart for validation, by the names' hashes."
    )
    image_column: str = Field("image", description="Column of parquet files that holds images.")
    label_column: str = Field("label", description="Column of parquet files and lists for labels.")
    crop_scale: Annotated[list[Share], Field(min_length=2, max_length=2)] = Field(
        [0.2, 1.0], description="Least and largest share of an image that a training crop shows."
    )
    flip: bool = Field(True, description="Mirror every second training image.")
    mean: list[float] = Field(
        [], description="Mean of each channel, of pixels from 0 to 1. []: ImageNet's."
    )
    std: list[Annotated[float, Field(gt=0)]] = Field(
        [], description="Standard deviation of each channel. []: ImageNet's."
    )
    max_bad: Literal["off"] | Count = Field(
        "off",
        description="Decode all images once, before ranks start, and leave out up to so many that"
        " are corrupt. off: a corrupt one ends the run when it is met.",
    )
    cache_dir: str = Field(
        "~/.cache/paceline", description="Where lists of images are kept between runs."
    )

    @field_validator("crop_scale")
    @classmethod
    def _least_comes_first(cls, scale: list[float]) -> list[float]:
        if scale[0] > scale[1]:
            raise ValueError(f"{scale}: the least share comes first")
        return scale


def prepare_images(data: ImageData, say: Callable[[str], None]) -> dict[str, Any]:
    """List the images of both paths once, before ranks start; the result is what `Images` accepts
    as `prepared`, and is written to data.json."""
    if data.path_train == SYNTHETIC:
        return {}
    home = _find(data, data.path_train, say)
    found = {"images_train": str(home), "num_images": len(ImageIndex(home))}
    if data.path_eval == "auto":
        return found
    home = _find(data, data.path_eval, say)
    return found | {"images_val": str(home), "num_eval_images": len(ImageIndex(home))}


def _find(data: ImageData, path: str, say: Callable[[str], None]) -> Path:
    if path == SYNTHETIC:
        raise ConfigError(
            "data.path_train is not set, and only mae draws synthetic images\n"
            "hint: data.path_train=FOLDER, or one of docs/images.md's other sources"
        )
    columns = Columns(data.image_column, data.label_column)
    return keep_index(ImageQuery(path, columns, data.cache_dir, data.max_bad), say, why_bad)


class Images:
    """The images of a split by index, each {"pixels": (C, size, size), "label": int}; a label is
    -1 if there is none. Loaders call `at(index, position)` for training data."""

    def __init__(
        self,
        data: ImageData,
        split: Split,
        size: int,
        channels: int = 3,
        seed: int = 0,
        prepared: Mapping[str, Any] | None = None,
    ) -> None:
        self.data, self.split, self.size, self.seed = data, split, size, seed
        self.mode = require_mode(channels)
        is_apart = split == "val" and data.path_eval != "auto"
        path = data.path_eval if is_apart else data.path_train
        known = (prepared or {}).get("images_val" if is_apart else "images_train")
        self.index = ImageIndex(Path(known) if known else _find(data, path, lambda text: None))
        if data.path_eval == "auto":
            self.ids = self.index.ids(split, data.val_fraction)
        else:
            self.ids = np.arange(len(self.index), dtype=np.int64)
        if not len(self.ids):
            raise DataError(
                f"none of the {len(self.index)} images of {path} falls to {split} with"
                f" data.val_fraction={data.val_fraction:g}\n"
                "hint: set another share, or data.path_eval"
            )
        self.mean, self.std = (per_channel(*each, channels) for each in self._norms())
        how = f"{size}-{channels}-{seed}-{data.crop_scale}-{data.flip}-{data.mean}-{data.std}"
        self.fingerprint = f"{self.index.fingerprint}-{split}-{data.val_fraction}-{how}"

    def _norms(self) -> list[tuple[str, list[float], tuple[float, ...]]]:
        return [("mean", self.data.mean, MEAN), ("std", self.data.std, STD)]

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of their labels; none where labels are numbers."""
        return self.index.classes

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.at(index, index)

    def at(self, index: int, position: int) -> dict[str, Any]:
        """Return a sample; a training one is cropped as the position in the run says."""
        import torch

        number = int(self.ids[index])
        image = self._decode(number)
        box, flips = centre_box(image.size), False
        if self.split == "train":
            draws = np.random.default_rng((self.seed, position))
            box = random_box(image.size, self.data.crop_scale, draws)
            flips = self.data.flip and bool(draws.random() < 0.5)
        # One resampling from the crop to the wanted size.
        image = image.resize((self.size, self.size), resample=3, box=box)  # 3: bicubic
        pixels = np.asarray(image, dtype=np.float32).reshape(self.size, self.size, -1) / 255
        pixels = ((pixels - self.mean) / self.std).transpose(2, 0, 1)
        pixels = np.ascontiguousarray(pixels[:, :, ::-1] if flips else pixels)
        return {
            "pixels": torch.from_numpy(pixels),
            "label": int(self.index.samples[number]["label"]),
        }

    def _decode(self, number: int) -> Any:
        try:
            return decode(self.index.read(number), self.mode)
        except ValueError as error:
            raise DataError(
                f"{self.index.describe(number)} cannot be decoded: {error}\n"
                "hint: replace it; data.max_bad=N leaves out up to N such images"
            ) from error


def decode(raw: bytes, mode: str) -> Any:
    """Return a pillow image with this mode; ValueError says why that is not possible."""
    pillow = require_extra("PIL.Image", "images")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which are checked here, and odd tags
            image = pillow.open(io.BytesIO(raw), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels")
            image.load()
            if image.mode.startswith("I;16"):  # pillow would clip, not scale
                image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError("its pixels are 32 bits wide, and have no known range")
            return image.convert(mode)
    except pillow.UnidentifiedImageError as error:
        raise ValueError(f"{len(raw)} bytes that are no image of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise anything on bytes in another format
        raise ValueError(str(error) or type(error).__name__) from error


def why_bad(raw: bytes) -> str:
    try:
        decode(raw, "RGB")
    except ValueError as error:
        return str(error)
    return ""


def require_mode(channels: int) -> str:
    if channels not in MODES:
        raise ConfigError(f"images have 1 or 3 channels here, and {channels} are asked for")
    return MODES[channels]


def centre_box(size: tuple[int, int]) -> Box:
    """Return the square in the middle that evaluation sees: left, upper, right, lower."""
    width, height = size
    side = CENTRE * min(width, height)
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def random_box(size: tuple[int, int], scale: Sequence[float], draws: np.random.Generator) -> Box:
    """Draw a crop by its area and its aspect ratio, the ratio evenly on a log scale; if none fits
    after some tries, take the largest in the middle."""
    width, height = size
    for _ in range(TRIES):
        area = width * height * draws.uniform(scale[0], scale[1])
        ratio = float(np.exp(draws.uniform(np.log(RATIOS[0]), np.log(RATIOS[1]))))
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            left, upper = draws.uniform(0, width - w), draws.uniform(0, height - h)
            return left, upper, min(left + w, width), min(upper + h, height)
    side = min(width, height)
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def per_channel(
    name: str, given: list[float], known: tuple[float, ...], channels: int
) -> NDArray[np.float32]:
    """Return one number per channel: given, or ImageNet's; of grey images the mean of its three."""
    if given and len(given) != channels:
        raise ConfigError(f"data.{name} has {len(given)} numbers for {channels} channels")
    usual = known if channels == len(known) else (sum(known) / len(known),)
    return np.array(given or usual, dtype=np.float32)
