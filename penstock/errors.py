"""Every error Penstock raises on purpose.

    PenstockError
    ├── ConfigError        a setting is wrong; the command line exits with 2
    │   └── NotInstalled   an optional package is missing; an ImportError too
    ├── TraceError         a trace cannot be read; the command line exits with 2
    ├── StoreError         a tier could not serve; to a request it is a miss, never an error
    │   ├── Missing        the block is not there (any more)
    │   ├── Corrupt        bytes are there, and they are not the block that was asked for
    │   ├── Full           there is no room for the block
    │   ├── ReadOnly       the store was opened for reading
    │   ├── Locked         another process writes here
    │   └── Foreign        the directory belongs to another model, layout or format version
    └── BookError          a caller broke a contract of the books: a bug in Penstock or its host

The first line of a message says what was wrong, what was expected, and what to do.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all errors below."""


class ConfigError(PenstockError):
    """A setting is wrong: unknown, malformed, or impossible on this machine."""


class NotInstalled(ConfigError, ImportError):
    """A package that an optional part of Penstock needs is not there. Says how to install it."""


class TraceError(PenstockError):
    """A trace is not what it should be. The message begins with the file and the line."""


class StoreError(PenstockError):
    """A tier could not do what was asked. The cache may lose; it may not lie."""


class Missing(StoreError):
    """The block is not in the store."""


class Corrupt(StoreError):
    """The store holds something under this name, and it is not the block."""


class Full(StoreError):
    """The store, or the device below it, has no room."""


class ReadOnly(StoreError):
    """The store was opened for reading only."""


class Locked(StoreError):
    """Another live process has the directory open for writing."""


class Foreign(StoreError):
    """The directory was written for another namespace, geometry or format version."""


class BookError(PenstockError):
    """A contract of the books was broken. Nothing was changed by the call that raised it."""
