"""From an image URL to pixels: data URLs only, with byte and pixel limits enforced before anything is decoded."""

import base64
import binascii
import io
import re
import urllib.parse
import warnings
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from shoal.cluster.api.errors import BadRequestError
from shoal.cluster.api.jobs import Canvas

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(r"data:(?P<mime>[\w.+-]+/[\w.+-]+)?(?P<options>(?:;[\w.+=\"-]+)*),", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """Pixels fitted to the vision tower's grid: uint8 [height, width, 3], its token grid and its digest."""

    canvas: Canvas
    grid_rows: int
    grid_columns: int
    digest: bytes


class ImagePreprocessor(Protocol):
    """The model's image rule."""

    def prepare(self, pixels: Canvas) -> PreparedImage:
        """Fit and pad RGB pixels, uint8 [height, width, 3], to the vision tower's grid and digest the result."""
        ...


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bytes of one encoded image and pixels it may declare."""

    bytes_max: int
    pixels_max: int


def decode_image_url(url: str, limits: ImageLimits, param: str) -> Canvas:
    """Return the RGB pixels, uint8 [height, width, 3], behind a data URL. Raises BadRequestError for all else."""
    return decode_image(_payload(url, limits, param), limits, param)


def decode_image(data: bytes, limits: ImageLimits, param: str) -> Canvas:
    """Decode one encoded image: turned upright by its EXIF tag, the first frame, transparency on white."""
    if len(data) > limits.bytes_max:
        raise _refuse(param, f"the image has {len(data)} bytes, the limit is {limits.bytes_max}", "image_too_large")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own bomb warning: the limit below is ours and lower
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > limits.pixels_max:
                    what = f"the image declares {width}x{height} pixels, the limit is {limits.pixels_max} in all"
                    raise _refuse(param, what, "image_too_large")
                return _rgb(ImageOps.exif_transpose(image))
    except BadRequestError:
        raise
    except Image.DecompressionBombError as error:
        what = f"the image declares far more pixels than the limit of {limits.pixels_max}"
        raise _refuse(param, what, "image_too_large") from error
    except UnidentifiedImageError as error:
        raise _refuse(param, f"the data is not an image this server reads ({', '.join(FORMATS)})") from error
    except Exception as error:  # a decoder given hostile bytes may raise anything: all of it is the client's
        raise _refuse(param, f"the image cannot be decoded: {type(error).__name__}") from error


def _rgb(image: Image.Image) -> Canvas:
    """RGB pixels of an image in any mode."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def _payload(url: str, limits: ImageLimits, param: str) -> bytes:
    """The bytes a data URL carries."""
    scheme = url.partition(":")[0].lower() if ":" in url else ""
    if scheme != "data":
        shown = scheme if re.fullmatch(r"[a-z][a-z0-9+.-]{0,15}", scheme) else "none"
        raise _refuse(param, f"URL scheme '{shown}' is not fetched; send the image as data:image/...;base64,...")
    head = _DATA_URL.match(url, 0, 256)
    if head is None:
        raise _refuse(param, "not a data URL; write data:image/png;base64,...")
    if len(url) > head.end() + 4 * (limits.bytes_max // 3 + 2) and "base64" in head["options"].lower():
        raise _refuse(param, f"the image is over the limit of {limits.bytes_max} bytes", "image_too_large")
    body = url[head.end() :]
    if not head["options"].lower().endswith(";base64"):
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode(urllib.parse.unquote(body) if "%" in body else body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refuse(param, f"the data URL's base64 is broken: {error}") from error


def _refuse(param: str, what: str, code: str = "invalid_image") -> BadRequestError:
    return BadRequestError(f"{param}: {what}", param=param, code=code)
