"""Pictures against the independent oracle: layout rule, canvas, patches, tower, aligner."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import ImageError
from shoal.engines.model.images import SpanToken, digest, grid_of, layout, patches, preprocess, span_tokens
from shoal.engines.model.vision import VisionEncoder
from shoal.engines.model.weights import load_model_weights

ORACLE = Path(__file__).resolve().parents[2] / "data" / "oracle"
PICTURES = ("image0", "image1", "image2", "image3", "image.image0", "images2.image0", "images2.image1")


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_dir(ORACLE)


@pytest.fixture(scope="module")
def encoder(config: ModelConfig) -> VisionEncoder:
    return VisionEncoder(config, load_model_weights(ORACLE, config, {"vision"}), torch.float32)


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    keys = ("pixels", "patches", "grid", "vit", "aligner", "token_types")
    found = {}
    for file in ("vision.npz", "reference.npz"):
        with np.load(ORACLE / file) as loaded:
            found |= {k: loaded[k] for k in loaded.files if k.rpartition(".")[2] in keys and ".taps" not in k}
    return found


def given_patches(arrays: dict[str, np.ndarray], name: str) -> torch.Tensor:
    return torch.from_numpy(arrays[f"{name}.patches"].view(np.int16)).view(torch.bfloat16)


def grid(arrays: dict[str, np.ndarray], name: str) -> tuple[int, int]:
    rows, columns = arrays[f"{name}.grid"].tolist()
    return rows, columns


def cases() -> list[tuple[str, dict[str, int]]]:
    data = json.loads((ORACLE / "image_layout.json").read_text())
    return [(name, size) for name in data for size in data[name]["sizes"]]


@pytest.mark.parametrize(("which", "size"), cases())
def test_layout_rule(config: ModelConfig, which: str, size: dict[str, int]) -> None:
    keys = json.loads((ORACLE / "image_layout.json").read_text())[which]["vision_config"]
    plan = layout(size["width"], size["height"], dataclasses.replace(config.vision, **keys))
    found = {"vit_rows": plan.vit_rows, "vit_columns": plan.vit_columns, "token_rows": plan.rows, "tokens": plan.tokens}
    assert found == {k: v for k, v in size.items() if k not in ("width", "height")}
    assert len(span_tokens(plan)) == plan.tokens <= keys["max_image_tokens"]


@pytest.mark.parametrize("name", PICTURES)
def test_canvas_and_patches(config: ModelConfig, arrays: dict[str, np.ndarray], name: str) -> None:
    canvas = preprocess(arrays[f"{name}.pixels"], config.vision)
    assert canvas.dtype == np.uint8
    assert grid_of(canvas, config.vision) == grid(arrays, name)
    own, given = patches(canvas, config.vision).float(), given_patches(arrays, name).flatten(1).float()
    assert (own - given).abs().mean() <= 0.02


@pytest.mark.parametrize("name", PICTURES[:4])
def test_span_roles(config: ModelConfig, arrays: dict[str, np.ndarray], name: str) -> None:
    height, width = arrays[f"{name}.pixels"].shape[:2]
    assert [int(t) for t in span_tokens(layout(width, height, config.vision))] == arrays[f"{name}.token_types"].tolist()


@pytest.mark.parametrize("name", PICTURES)
def test_tower_and_aligner(encoder: VisionEncoder, arrays: dict[str, np.ndarray], name: str) -> None:
    features = encoder.tower(given_patches(arrays, name), grid(arrays, name))
    for own, key in ((features, "vit"), (encoder.align(features, grid(arrays, name)), "aligner")):
        golden = torch.from_numpy(arrays[f"{name}.{key}"])
        assert own.shape == golden.shape
        assert (own - golden).abs().max() <= 1e-4 * (golden.max() - golden.min()), key


def test_span_rows_hold_the_delimiters(config: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    weights = load_model_weights(ORACLE, config, {"vision"})
    encoder = VisionEncoder(config, weights)
    rows = encoder.encode(given_patches(arrays, "image2"), grid(arrays, "image2"))
    roles = torch.from_numpy(arrays["image2.token_types"])
    assert rows.dtype == torch.bfloat16
    assert len(rows) == len(roles)
    for role, name in (
        (SpanToken.START, "image_start"),
        (SpanToken.NEWLINE, "image_newline"),
        (SpanToken.END, "image_end"),
    ):
        assert torch.equal(rows[roles == role], weights[name].expand(int((roles == role).sum()), -1))
    golden = torch.from_numpy(arrays["image2.aligner"])
    own = rows[roles == SpanToken.IMAGE].float()
    assert (own - golden).abs().mean() <= 0.01 * (golden.max() - golden.min())


def test_threads_do_not_change_a_bit(config: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    encoder = VisionEncoder(config, load_model_weights(ORACLE, config, {"vision"}))
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(encoder.encode(given_patches(arrays, "image2"), grid(arrays, "image2")))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_digest_names_pixels_and_layout(config: ModelConfig) -> None:
    vision = config.vision
    canvas = np.zeros((28, 56, 3), dtype=np.uint8)
    names = {digest(canvas, vision), digest(canvas.reshape(56, 28, 3), vision)}
    names |= {digest(canvas + 1, vision), digest(canvas, dataclasses.replace(vision, patch_size=28))}
    assert len(names) == 4
    assert {len(n) for n in names} == {32}
    assert digest(canvas.copy(), vision) in names


def test_a_very_wide_picture_is_stretched_to_the_ratio(config: ModelConfig) -> None:
    vision = dataclasses.replace(config.vision, max_wh_ratio=2.0)
    picture = np.zeros((100, 1000, 3), dtype=np.uint8)
    picture[:, 500:] = 255
    canvas = preprocess(picture, vision)
    assert canvas.shape[1] <= 2 * canvas.shape[0] + 14
    assert set(np.unique(canvas[:, [0, -1]])) == {0, 255}


def test_what_is_not_a_picture_is_refused(config: ModelConfig, encoder: VisionEncoder) -> None:
    with pytest.raises(ImageError, match="mode is RGBA: only RGB"):
        preprocess(Image.new("RGBA", (20, 20)), config.vision)
    with pytest.raises(ImageError, match=r"float32 \[20, 20, 3\]: give uint8"):
        preprocess(np.zeros((20, 20, 3), dtype=np.float32), config.vision)  # type: ignore[arg-type]
    with pytest.raises(ImageError, match="0x20 pixels"):
        preprocess(np.zeros((20, 0, 3), dtype=np.uint8), config.vision)
    with pytest.raises(ImageError, match="multiples of 14"):
        patches(np.zeros((20, 28, 3), dtype=np.uint8), config.vision)
    with pytest.raises(ImageError, match="do not fit grid"):
        encoder.encode(torch.zeros(5, 588), (2, 3))


@pytest.mark.parametrize(
    ("size", "patch_grid", "is_stretched"),
    [
        ((18, 3), (1, 2), True),  # 3 x 3.5 = 10.5 pixels allowed: two patches of 10, not one
        ((35, 10), (1, 4), True),  # exactly the ratio
        ((34, 10), (1, 4), False),
    ],
)
def test_a_ratio_that_is_not_whole_limits_the_width(
    config: ModelConfig, size: tuple[int, int], patch_grid: tuple[int, int], is_stretched: bool
) -> None:
    vision = dataclasses.replace(config.vision, patch_size=10, min_pixels=1, max_wh_ratio=3.5)
    plan = layout(*size, vision)
    assert ((plan.vit_rows, plan.vit_columns), plan.stretch) == (patch_grid, is_stretched)


def test_a_picture_of_which_nothing_is_left_is_refused(config: ModelConfig) -> None:
    few = dataclasses.replace(config.vision, patch_size=10, downsample_ratio=1, max_image_tokens=7, max_wh_ratio=3.5)
    with pytest.raises(ImageError, match=r"2090x2 pixels.*max_image_tokens = 7"):
        layout(2090, 2, few)
