"""One module per family of architectures: declarations only. Importing this package registers them
all.
"""

from . import llama

__all__ = ["llama"]
