"""All errors that Penstock raises on purpose.

    PenstockError
    ├── ConfigError        a setting is wrong; the command line exits with 2
    │   └── NotInstalled   an optional package is missing; also an ImportError
    ├── TraceError         a trace cannot be read; the command line exits with 2
    ├── StoreError         a tier failed; to a request this is a miss, never an error
    │   ├── Missing        the block is not in the store
    │   ├── Corrupt        the stored bytes are not the requested block
    │   ├── Full           the store has no room for the block
    │   ├── ReadOnly       the store was opened for reading only
    │   ├── Locked         another process writes to the directory
    │   └── Foreign        the directory belongs to another model, layout or format version
    └── BookError          a contract of the books was broken: a bug in Penstock or its client

The first line of a message says what is wrong, what was expected, and what to do.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base class of all errors below."""


class ConfigError(PenstockError):
    """A setting is wrong: unknown, malformed, or impossible on this machine."""


class NotInstalled(ConfigError, ImportError):
    """A package that an optional part of Penstock needs is missing. Says how to install it."""


class TraceError(PenstockError):
    """A trace is malformed. The message starts with the file and the line."""


class StoreError(PenstockError):
    """A tier failed. The cache may lose a block, but never returns a wrong one."""


class Missing(StoreError):
    """The block is not in the store."""


class Corrupt(StoreError):
    """The store holds something else under this name."""


class Full(StoreError):
    """The store, or the disk it is on, is full."""


class ReadOnly(StoreError):
    """The store was opened for reading only."""


class Locked(StoreError):
    """Another live process has the directory open for writing."""


class Foreign(StoreError):
    """The directory was written for another namespace, geometry or format version."""


class BookError(PenstockError):
    """A contract of the books was broken. The call that raised this changed nothing."""
