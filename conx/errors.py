"""What can go wrong with somebody's data.

    ConxError
    ├── FormatError        the .conx file is damaged, hostile or cut short
    │   └── IntegrityError     bytes do not have the hash that was recorded for them
    ├── UnsupportedError   the file or the request is valid, but needs something that is named
    └── ModelError         the ONNX model given is at fault

Misuse of the API is a ValueError or TypeError. A message is one line: which file or tensor, which field, which
value, and what to do.
"""

__all__ = ["ConxError", "FormatError", "IntegrityError", "ModelError", "UnsupportedError"]


class ConxError(Exception):
    """Base of all errors that are about data rather than about the call."""


class FormatError(ConxError):
    """The .conx file breaks a rule of the format."""


class IntegrityError(FormatError):
    """Bytes of the .conx file do not have the hash or checksum recorded for them."""


class UnsupportedError(ConxError):
    """Valid, but it needs a feature, precision, package or newer version, which the message names."""


class ModelError(ConxError):
    """The ONNX model (or one of its external data files) cannot be read as it claims to be."""
