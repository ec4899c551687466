"""DLPack capsules, read without using them up: a script of DashInfer's starts many requests with
one, which its engine copies."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from allspark.input_ids import DLPackCapsule

_NAME = b"dltensor"  # of a capsule that nobody has used; it is compared as a C string
# DLManagedTensor of the DLPack standard: 56 bytes, and a pointer to what deletes it, which may be
# null.
_NUM_BYTES = 56
_NO_DELETER = bytes(8)

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def is_capsule(value: Any) -> bool:
    return type(value).__name__ == "PyCapsule"


def read_capsule(capsule: Any) -> np.ndarray:
    """A copy of the tensor in a capsule, which stays as it was."""
    if not _is_valid(capsule, _NAME):  # of a later version, or used: NumPy says what is wrong
        return np.from_dlpack(DLPackCapsule(capsule))
    borrowed = ctypes.create_string_buffer(
        ctypes.string_at(_get_pointer(capsule, _NAME), _NUM_BYTES) + _NO_DELETER
    )
    view = np.from_dlpack(DLPackCapsule(_new(ctypes.addressof(borrowed), _NAME, None)))
    copy = view.copy()
    del view  # before what it points into
    return copy
