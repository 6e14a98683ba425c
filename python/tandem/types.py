"""Types of arrays that tandem gives out."""
from typing import Any

import numpy
import numpy.typing

FloatArray = numpy.typing.NDArray[numpy.float32]
Array = numpy.typing.NDArray[Any]
