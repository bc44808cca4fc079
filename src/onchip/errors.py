"""Every error a user can meet: one line that says what, where and what to do."""

from __future__ import annotations


class OnchipError(Exception):
    """Base of all errors raised on purpose; the message is a single, complete sentence."""


class UnknownModel(OnchipError):
    """A MODEL argument that names nothing onchip can load."""


class CaptureError(OnchipError):
    """The model could not be turned into a graph (data-dependent control flow, odd inputs)."""


class InputError(OnchipError):
    """A call's arguments do not fit the program: structure, shape, dtype, device."""


class CompilerError(OnchipError):
    """A compiler is missing, refused a generated source, died, or took too long."""


class DeviceError(OnchipError):
    """The GPU's driver is missing, or one of its functions failed."""


class CacheError(OnchipError):
    """The cache folder can't be used (read-only, full)."""


class LockError(OnchipError):
    """A lock file can't be read or written, or does not fit what is compiled."""


class VerificationError(OnchipError):
    """A candidate or a whole program does not agree with its reference."""


class InternalError(OnchipError):
    """A defect of onchip itself: please report it with the message."""


class OpaqueOperator(Exception):
    """Raised by an operator's function where this use can't be an expression (library only).

    The text is kept and shown as the reason for which nothing is fused there.
    """
