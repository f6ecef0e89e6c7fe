"""The model's image rule for the HTTP side: fit and pad to the vision grid, lay out the span, digest."""

from pathlib import Path

from shoal.cluster.api.errors import BadRequestError
from shoal.cluster.api.images import PreparedImage
from shoal.cluster.api.jobs import Canvas
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import ImageError
from shoal.engines.model.images import digest, layout, preprocess


class ModelPixels:
    """Preprocesses for the model in a checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        self._vision = ModelConfig.from_dir(directory).vision

    def prepare(self, pixels: Canvas) -> PreparedImage:
        """RGB pixels, uint8 [height, width, 3], to the canvas the tower sees. Raises BadRequestError."""
        try:
            height, width, _ = pixels.shape
            plan = layout(width, height, self._vision)
            canvas = preprocess(pixels, self._vision)
        except ImageError as error:
            raise BadRequestError(str(error), param="messages") from error
        return PreparedImage(canvas, plan.rows, plan.columns, digest(canvas, self._vision))
