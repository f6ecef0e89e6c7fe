"""Pictures of coloured shapes on a light ground, one shape a cell of a 2 x 2 or 3 x 3 grid."""

import math
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from shoal.engines.toy.tasks.words import COLOURS

# Saturated, and far from each other and from the ground.
RGB = {
    "red": (225, 20, 20), "green": (20, 160, 40), "blue": (25, 50, 225), "yellow": (245, 215, 0),
    "orange": (255, 135, 0), "purple": (150, 30, 180), "black": (10, 10, 10), "brown": (120, 70, 25),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "cross")
PLACES = {
    2: ("top left", "top right", "bottom left", "bottom right"),
    3: ("top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right"),
}
SIDE_MIN, SIDE_MAX = 84, 260
# A shape of a 3 x 3 grid still covers about a whole image token.
SIDE_MIN_OF_NINE = 150
FILL_MIN, FILL_MAX = 0.6, 0.82
OBJECTS_MAX = 4
EASY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Thing:
    """One drawn shape: its colour, its form, and where it is."""

    colour: str
    shape: str
    place: str

    @property
    def name(self) -> str:
        """Colour and shape."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The things in reading order, and their picture: uint8 [height, width, 3]."""

    things: tuple[Thing, ...]
    pixels: NDArray[np.uint8]


def draw_picture(dice: Random, objects: int = 0) -> Picture:
    """A picture of `objects` different things (0: one half of the time, else two to four)."""
    objects = objects or (1 if dice.random() < EASY_SHARE else dice.randint(2, OBJECTS_MAX))
    width, height = dice.randint(SIDE_MIN, SIDE_MAX), dice.randint(SIDE_MIN, SIDE_MAX)
    grid = 3 if min(width, height) >= SIDE_MIN_OF_NINE and dice.random() < 0.5 else 2
    cells = sorted(dice.sample(range(grid * grid), objects))
    kinds = dice.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], objects)
    things = tuple(Thing(*kind, PLACES[grid][cell]) for kind, cell in zip(kinds, cells, strict=True))
    ground = dice.randint(228, 255), dice.randint(228, 255), dice.randint(228, 255)
    image = Image.new("RGB", (width, height), ground)
    pen = ImageDraw.Draw(image)
    for thing, cell in zip(things, cells, strict=True):
        _draw(dice, pen, thing, _box(dice, (width / grid, height / grid), divmod(cell, grid)))
    return Picture(things, np.asarray(image, dtype=np.uint8))


def _box(dice: Random, cell: tuple[float, float], at: tuple[int, int]) -> tuple[float, float, float]:
    """Centre and radius of a shape: it fills most of its cell's shorter side and is moved a little within it."""
    radius = min(cell) * (FILL_MIN + (FILL_MAX - FILL_MIN) * dice.random()) / 2
    row, column = at
    free_x, free_y = cell[0] / 2 - radius, cell[1] / 2 - radius
    x = (column + 0.5) * cell[0] + free_x * (dice.random() - 0.5)
    y = (row + 0.5) * cell[1] + free_y * (dice.random() - 0.5)
    return x, y, radius


def _draw(dice: Random, pen: ImageDraw.ImageDraw, thing: Thing, box: tuple[float, float, float]) -> None:
    x, y, radius = box
    red, green, blue = (min(255, max(0, level + dice.randint(-10, 10))) for level in RGB[thing.colour])
    colour = (red, green, blue)
    if thing.shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif thing.shape == "square":
        side = radius * 0.9
        pen.rectangle((x - side, y - side, x + side, y + side), fill=colour)
    elif thing.shape == "cross":
        arm = radius * 0.33
        pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
        pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
    elif thing.shape == "triangle":
        pen.polygon(((x, y - radius), (x + radius, y + radius), (x - radius, y + radius)), fill=colour)
    else:
        pen.polygon(_star(x, y, radius), fill=colour)


def _star(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Ten corners of a star of five points, one of them upwards."""
    corners = []
    for i in range(10):
        reach = radius * (1.1 if i % 2 == 0 else 0.45)
        angle = math.pi * (i / 5 - 0.5)
        corners.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return corners
