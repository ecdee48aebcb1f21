"""The version, in a file of its own so that the build reads it without importing anything."""

__all__ = ["__version__"]

__version__ = "0.1.0"
