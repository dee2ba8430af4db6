"""What a caller may hand in: arrays, counts and numbers, or one clear error.

Every message names the argument, shows the offending value and says what would be right.
"""

import math
import numbers

import numpy as np

FLOATS = (np.float16, np.float32, np.float64)


def float_array(name, x):
    """Return x as a float array: float16, 32 and 64 stay, integers and lists become float64."""
    array = any_array(name, x)
    if array.dtype.kind in "iu":
        return array.astype(np.float64)
    if array.dtype.newbyteorder("=") not in FLOATS:
        raise TypeError(
            f"{name} has dtype {array.dtype}; give float16, float32 or float64 "
            f"(integers and lists of numbers are taken as float64)"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def bool_array(name, x, instead=""):
    """Return x as a boolean array; `instead` tells what to use for other kinds of values."""
    array = any_array(name, x)
    if array.dtype != bool:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be boolean, True = seen{instead}")
    return array


def any_array(name, x):
    """Return x as a NumPy array without a copy where possible: `__array__` first, then DLPack."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; give x.filled(...)")
    try:
        if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
            return np.from_dlpack(x)
        return np.asarray(x)
    except Exception as error:  # whatever a foreign array type raises
        what = "a ragged list (dtype object)" if isinstance(x, list | tuple) else type(x).__name__
        raise TypeError(f"{name} is {what} and cannot be read as an array: {error}") from error


def compute_dtype(*arrays):
    """Return the dtype to calculate in: NumPy's result type, but float32 for float16."""
    return np.result_type(*arrays, np.float32) if arrays else np.dtype(np.float64)


def count(name, value, least=1, hint=""):
    """Return value as an int; anything but an integer of at least `least` is refused."""
    if not is_integer(value):
        raise TypeError(f"{name}={value!r} must be an integer of at least {least}{hint}")
    if value < least:
        raise ValueError(f"{name}={value!r} must be at least {least}{hint}")
    return int(value)


def is_integer(value):
    """Return whether value is an integer; True, False and 16.0 are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)


def finite_number(name, value, hint=""):
    """Return value as a float; NaN, infinities and whatever is no number are refused."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a finite number{hint}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r} must be a finite number{hint}")
    return number


def require(condition, message):
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)
