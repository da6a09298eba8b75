"""Array types that the figures of many layers, actions and plans are held in, and what is asked of them everywhere."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
"""Seconds, bytes and other amounts."""
Indices = npt.NDArray[np.integer[Any]]
"""Positions in other arrays, or numbers of actions and messages; -1 where there is none."""
Flags = npt.NDArray[np.bool_]


def median_index(values: Array | Sequence[float]) -> int:
    """Where the median stands; of an even number of values, the lower of the two in the middle."""
    return int(np.argsort(values)[(len(values) - 1) // 2])
