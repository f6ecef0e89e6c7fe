"""The encoder role: pixels of one image to the embedding rows of its span."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.images import grid_of, patches
from shoal.engines.model.names import Part
from shoal.engines.model.vision import VisionEncoder, token_grid
from shoal.engines.model.weights import load_model_weights
from torch import Tensor

Canvas = npt.NDArray[np.uint8]


class VisionRunner:
    """Vision tower and aligner of one checkpoint; nothing else of it is loaded."""

    def __init__(self, config: ModelConfig, encoder: VisionEncoder) -> None:
        self.config = config
        self._encoder = encoder

    @classmethod
    def load(cls, directory: Path) -> "VisionRunner":
        """The tower of the checkpoint in `directory`; raises ConfigError, WeightsError."""
        config = ModelConfig.from_dir(directory)
        return cls(config, VisionEncoder(config, load_model_weights(directory, config, {Part.VISION})))

    @torch.inference_mode()
    def encode(self, canvas: Canvas) -> Tensor:
        """Rows [span length, hidden] of one preprocessed image, uint8 [height, width, 3], delimiters included.

        Each image is computed alone, so equal pixels give equal rows whatever else is queued. Raises ImageError.
        """
        return self._encoder.encode(patches(canvas, self.config.vision), grid_of(canvas, self.config.vision))

    def span_length(self, canvas: Canvas) -> int:
        """Rows that `encode` will give: rows * (columns + 1) + 2. Raises ImageError."""
        rows, columns = token_grid(grid_of(canvas, self.config.vision), self.config.vision)
        return rows * (columns + 1) + 2
