"""From a picture to patches: the layout rule, the padded canvas, its patches, and the digest that names both.

Source: official image_processor.py and DeepInfer's layout rule (design: resize to whole patches, fit, pad).
"""

import hashlib
import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from shoal.engines.model.config import VisionConfig
from shoal.engines.model.errors import ImageError
from torch import Tensor

PAD_VALUE = 127
DIGEST_VERSION = b"shoal-image-1"


class SpanToken(IntEnum):
    """Role of one placeholder of an image span; all of them carry the image token id."""

    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What a picture of some size becomes: a grid of patches, and a smaller grid of tokens."""

    vit_rows: int
    vit_columns: int
    rows: int
    columns: int
    patch_size: int
    stretch: bool

    @property
    def tokens(self) -> int:
        """Placeholders of the span, delimiters included."""
        return self.rows * (self.columns + 1) + 2

    @property
    def canvas_width(self) -> int:
        """Pixels of the padded canvas, across."""
        return self.vit_columns * self.patch_size

    @property
    def canvas_height(self) -> int:
        """Pixels of the padded canvas, down."""
        return self.vit_rows * self.patch_size


def layout(width: int, height: int, vision: VisionConfig) -> ImageLayout:
    """The layout of a `width` x `height` picture; raises ImageError for an empty one, or one that cannot fit."""
    if width < 1 or height < 1:
        raise ImageError(f"image is {width}x{height} pixels: both sides must be at least 1; send a real picture")
    stretch = vision.max_wh_ratio is not None and width >= height * vision.max_wh_ratio
    # The allowed width need not be whole; it is rounded up to patches like any other.
    wide = max(1.0, height * vision.max_wh_ratio) if vision.max_wh_ratio is not None and stretch else float(width)
    high = float(height)
    if wide * high < vision.min_pixels:
        grow = math.sqrt(vision.min_pixels / (wide * high))
        wide, high = float(int(wide * grow)), float(int(high * grow))
    patch, cell = vision.patch_size, vision.patch_size * vision.downsample_ratio
    box_width, box_height = math.ceil(wide / patch) * patch, math.ceil(high / patch) * patch
    if _tokens(box_width, box_height, cell) > vision.max_image_tokens:
        box_width, box_height = _shrunk(wide, high, vision)
    if min(box_width, box_height) < patch or _tokens(box_width, box_height, cell) > vision.max_image_tokens:
        raise ImageError(
            f"image is {width}x{height} pixels: within max_image_tokens = {vision.max_image_tokens} no row of patches "
            "is left of it; send a picture of less extreme shape"
        )
    vit_columns, vit_rows = box_width // patch, box_height // patch
    ratio = vision.downsample_ratio
    return ImageLayout(vit_rows, vit_columns, -(-vit_rows // ratio), -(-vit_columns // ratio), patch, stretch)


def _tokens(box_width: int, box_height: int, cell: int) -> int:
    return -(-box_height // cell) * (-(-box_width // cell) + 1) + 2


def _shrunk(width: float, height: float, vision: VisionConfig) -> tuple[int, int]:
    """The largest box of nearly this shape whose span fits `max_image_tokens`; a very thin picture gets one line."""
    patch, cell = vision.patch_size, vision.patch_size * vision.downsample_ratio
    room, aspect = vision.max_image_tokens - 2, height / width
    across = math.sqrt(room / aspect + 0.25) - 0.5
    down = across * aspect
    if across < 1:
        return cell, (room // 2) * cell
    if down < 1:
        return (room - 1) * cell, cell
    shrink = min(math.floor(across) * cell / width, math.floor(down) * cell / height)
    return math.floor(width * shrink / patch) * patch, math.floor(height * shrink / patch) * patch


def span_tokens(image: ImageLayout) -> tuple[SpanToken, ...]:
    """The role of each placeholder, in order: START, each row's IMAGEs with a NEWLINE, END."""
    row = (SpanToken.IMAGE,) * image.columns + (SpanToken.NEWLINE,)
    return (SpanToken.START, *(row * image.rows), SpanToken.END)


def preprocess(picture: Image.Image | NDArray[np.uint8], vision: VisionConfig) -> NDArray[np.uint8]:
    """The canvas of a picture: uint8 [height, width, 3], whole patches, the picture fitted in the middle.

    A PIL picture of another mode must be converted to RGB first (what to do with transparency is the caller's
    choice). Raises ImageError.
    """
    image = picture if isinstance(picture, Image.Image) else _from_array(picture)
    if image.mode != "RGB":
        raise ImageError(f"image mode is {image.mode}: only RGB is encoded; convert it with .convert('RGB')")
    plan = layout(image.width, image.height, vision)
    size = (plan.canvas_width, plan.canvas_height)
    if plan.stretch:
        canvas = image.resize(size, Image.Resampling.BICUBIC)
    else:
        canvas = ImageOps.pad(image, size, Image.Resampling.BICUBIC, color=(PAD_VALUE,) * 3, centering=(0.5, 0.5))
    return np.asarray(canvas, dtype=np.uint8)


def _from_array(picture: NDArray[np.uint8]) -> Image.Image:
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise ImageError(f"image array is {picture.dtype} {list(picture.shape)}: give uint8 [height, width, 3], RGB")
    if 0 in picture.shape:
        raise ImageError(f"image is {picture.shape[1]}x{picture.shape[0]} pixels: both sides must be at least 1")
    return Image.fromarray(picture)


def grid_of(canvas: NDArray[np.uint8], vision: VisionConfig) -> tuple[int, int]:
    """Patch rows and columns of a canvas; raises ImageError when it is not whole patches."""
    patch = vision.patch_size
    if (
        canvas.ndim != 3
        or canvas.shape[2] != 3
        or canvas.shape[0] % patch
        or canvas.shape[1] % patch
        or not canvas.size
    ):
        raise ImageError(
            f"canvas is {list(canvas.shape)}: give [height, width, 3] in multiples of {patch}, as preprocess returns"
        )
    return canvas.shape[0] // patch, canvas.shape[1] // patch


def patches(canvas: NDArray[np.uint8], vision: VisionConfig) -> Tensor:
    """BF16 [rows * columns, 3 * patch * patch] of a canvas in [-1, 1]; a patch is (channel, row, column)."""
    rows, columns = grid_of(canvas, vision)
    patch = vision.patch_size
    values = (torch.from_numpy(np.array(canvas)).to(torch.float32) / 255 - 0.5) / 0.5
    tiles = values.view(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3)
    return tiles.reshape(rows * columns, vision.patch_channels).to(torch.bfloat16)


def digest(canvas: NDArray[np.uint8], vision: VisionConfig) -> bytes:
    """SHA-256 of what the tower sees: the canvas, its layout and the rule's constants. Equal digest, equal rows."""
    rows, columns = grid_of(canvas, vision)
    head = f"{rows},{columns},{vision.patch_size},{vision.downsample_ratio};".encode()
    return hashlib.sha256(DIGEST_VERSION + head + np.ascontiguousarray(canvas, dtype=np.uint8).tobytes()).digest()
