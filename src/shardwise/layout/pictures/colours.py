"""The colour of a rank, the same in every picture, and the ink that can be read on it."""

from __future__ import annotations

import math
from functools import lru_cache

# From rank to rank, hue and lightness go on by these parts of their circle and range. The steps were searched for, so
# that among the first 8, 16, 32, 64 and 128 ranks the two closest colours are as far apart as steps can make them.
STEPS = (0.7007, 0.5225)
FIRST = (0.66, 0.1734)  # rank 0 is blue
LIGHTNESS = (0.52, 0.84)
CHROMA = 0.14
NOBODY = "#8a8f98"  # of a place that names no rank


@lru_cache(maxsize=4096)
def colour(rank: int) -> str:
    """The colour of a rank, as ``#rrggbb``."""
    if rank < 0:
        return NOBODY
    hue, light = ((start + rank * step) % 1.0 for start, step in zip(FIRST, STEPS, strict=True))
    lightness = LIGHTNESS[0] + light * (LIGHTNESS[1] - LIGHTNESS[0])
    chroma = CHROMA
    while True:  # the screen has less chroma for some hues
        parts = _linear_rgb(lightness, chroma, 2 * math.pi * hue)
        if all(-1e-9 <= part <= 1 + 1e-9 for part in parts):
            return "#" + "".join(f"{round(255 * _encoded(part)):02x}" for part in parts)
        chroma -= 0.005


def ink_on(background: str) -> str:
    """Black or white, whichever has more contrast."""
    return max("#000", "#fff", key=lambda ink: contrast(background, ink))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours as WCAG defines it, from 1 to 21."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of ``#rrggbb`` or ``#rgb``, up to 255."""
    digits = colour.removeprefix("#")
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    red, green, blue = (int(digits[at : at + 2], 16) for at in (0, 2, 4))
    return red, green, blue


def _luminance(colour: str) -> float:
    parts = [_decoded(channel / 255) for channel in channels(colour)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def _linear_rgb(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """A colour of the Oklab space, where equal distances look equal, as linear red, green and blue."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )


def _encoded(part: float) -> float:
    part = min(max(part, 0.0), 1.0)
    return 12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055


def _decoded(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
