"""Colours of terms: eight that stay apart, also for colour-blind readers, on light and on dark."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from steelyard.experiment.page.app import STATIC

# Machado, Oliveira & Fernandes 2009, severity 1, for linear RGB.
VISION = {
    "full": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# Ottosson 2020, Oklab: linear RGB to cone responses, and their cube roots to L, a, b.
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
CONTRAST = 3.0  # WCAG 2.2, 1.4.11: of graphical objects
DISTANCE = 0.07  # in Oklab, where 0.02 can just be noticed


def linear(colour: str) -> NDArray[np.float64]:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def luminance(rgb: NDArray[np.float64]) -> float:
    return float(rgb @ [0.2126, 0.7152, 0.0722])


def palettes() -> list[dict[str, str]]:
    """Variables of the light and of the dark scheme."""
    css = (STATIC / "style.css").read_text(encoding="utf-8")
    blocks = re.findall(r"\{([^{}]*--c1:[^{}]*)\}", css)
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in blocks]


def test_there_is_a_light_and_a_dark_palette() -> None:
    light, dark = palettes()
    assert luminance(linear(light["card"])) > 0.9
    assert luminance(linear(dark["card"])) < 0.05


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_colour_stands_out_from_the_card(scheme: int) -> None:
    palette = palettes()[scheme]
    card = luminance(linear(palette["card"]))
    for name in [*(f"c{n}" for n in range(1, 9)), "base", "total", "accent", "soft"]:
        low, high = sorted([card, luminance(linear(palette[name]))])
        assert (high + 0.05) / (low + 0.05) >= CONTRAST, name


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_any_two_colours_can_be_told_apart(scheme: int, vision: str) -> None:
    palette = palettes()[scheme]
    seen = [np.clip(np.array(VISION[vision]) @ linear(palette[f"c{n}"]), 0, 1) for n in range(1, 9)]
    labs = np.array([np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ rgb) for rgb in seen])
    distances = np.linalg.norm(labs[:, None] - labs[None], axis=-1)
    assert distances[np.triu_indices(8, 1)].min() >= DISTANCE
