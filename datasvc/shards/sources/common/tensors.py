"""Make columns of tensors, for sources of arrays: `fixed_size_list` in C order, with the shape in the metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import ConfigError

SHAPE: Final = b"datasvc.shape"  # key in the field's metadata; its value is the shape of one sample as JSON
MAX_SAMPLE_BYTES: Final = 256 << 20  # a larger sample is refused


def tensor_field(name: str, dtype: npt.DTypeLike, shape: Sequence[int]) -> pa.Field:
    """Return the field of a column with one tensor per sample; a single value per sample makes a scalar column.

    `shape` is that of one sample.

    Raises:
        ConfigError: `dtype` is not supported, a dimension is not positive, or one sample is larger than
            `MAX_SAMPLE_BYTES`.
    """
    dtype = np.dtype(dtype)
    # bool, signed and unsigned integers, and floats. Arrow has none of more than 8 bytes.
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ConfigError(f"{name!r} holds values of type {dtype}; expected bool, integers or floats")
    value_type = pa.from_numpy_dtype(dtype.newbyteorder("="))
    num_values = math.prod(shape)
    if any(size < 1 for size in shape):
        raise ConfigError(f"samples of {name!r} have the shape {list(shape)}; expected positive dimensions")
    if num_values * dtype.itemsize > MAX_SAMPLE_BYTES:
        raise ConfigError(
            f"one sample of {name!r} has the shape {list(shape)}, over {MAX_SAMPLE_BYTES >> 20} MiB; "
            "expected the samples along the first axis"
        )
    if num_values == 1:
        return pa.field(name, value_type, nullable=False)
    metadata = {SHAPE: json.dumps(list(shape)).encode()}
    return pa.field(name, pa.list_(value_type, num_values), nullable=False, metadata=metadata)


def tensor_array(field: pa.Field, values: npt.NDArray[Any]) -> pa.Array:
    """Return `values[samples, ...]` as an Arrow array of `field`, which `tensor_field` made for the same type."""
    # Arrow needs contiguous values in the machine's byte order.
    native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    if not pa.types.is_fixed_size_list(field.type):
        return pa.array(native.reshape(-1), field.type)
    return pa.FixedSizeListArray.from_arrays(pa.array(native.reshape(-1)), type=field.type)
