"""Reads DLPack capsules without consuming them: DashInfer copies a capsule's tensor, so its scripts
start many requests with one."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from allspark.input_ids import DLPackCapsule

_NAME = b"dltensor"  # of a capsule that was not consumed; compared as a C string
# DLManagedTensor of the DLPack standard: 56 bytes, and a pointer to its deleter, which may be
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


def read_capsule(capsule: Any) -> np.ndarray:
    """A copy of the tensor in a capsule, which stays as it was."""
    if not _is_valid(capsule, _NAME):  # a later version, or consumed: NumPy's error says which
        return np.from_dlpack(DLPackCapsule(capsule))
    borrowed = ctypes.create_string_buffer(
        ctypes.string_at(_get_pointer(capsule, _NAME), _NUM_BYTES) + _NO_DELETER
    )
    view = np.from_dlpack(DLPackCapsule(_new(ctypes.addressof(borrowed), _NAME, None)))
    copy = view.copy()
    del view  # before the memory that it points into
    return copy
