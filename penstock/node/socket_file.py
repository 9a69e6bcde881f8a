"""The socket at which a node listens: who may connect, and when an old one is removed."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from penstock.errors import ConfigError

_MAX_PATH_BYTES = 107  # of a Unix socket, on Linux
_CHOOSE = "choose another with --socket"


def check_socket(path: Path) -> None:
    """Raise ConfigError if a node cannot listen there. Removes and creates nothing."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket's path {path} has {len(os.fsencode(path))} bytes: expected at most "
            f"{_MAX_PATH_BYTES}, as Linux allows; {_CHOOSE}."
        )
    _find_dead_socket(path)


def listen(path: Path, group: int | None) -> socket.socket:
    """Listen at `path`, for this user, and for `group` if given. Raises ConfigError."""
    check_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        if _find_dead_socket(path):
            os.unlink(path)
        # Nobody else may connect between `bind` and `chmod`.
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        if group is not None:
            _give_to_group(path, group)
        listener.listen(64)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:  # another was faster
            raise _in_use(path) from None
        raise ConfigError(
            f"the node cannot listen at {path} ({error.strerror or error}): expected a path in a "
            f"folder that this user can write to; {_CHOOSE}."
        ) from None
    return listener


def _give_to_group(path: Path, group: int) -> None:
    try:
        os.chown(path, -1, group)
        os.chmod(path, 0o660)
    except OSError as error:
        os.unlink(path)
        raise ConfigError(
            f"the socket cannot be given to group {group} ({error.strerror}): expected a group "
            "that this user belongs to; add the user to it, or choose another with --group."
        ) from None


def _find_dead_socket(path: Path) -> bool:
    """Whether the socket of a node that is gone is there. Raises ConfigError if it is in use."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(
                f"{path} exists and is not a socket: expected a path for a new socket; {_CHOOSE}."
            )
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(
            f"the node cannot listen at {path} ({error.strerror}): expected a path that this user "
            f"can reach; {_CHOOSE}."
        ) from None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except PermissionError:
            raise ConfigError(
                f"{path} is the socket of another user: expected a path for a new socket; "
                f"{_CHOOSE}."
            ) from None
        except OSError:
            pass  # it exists, but does not answer
    raise _in_use(path)


def _in_use(path: Path) -> ConfigError:
    return ConfigError(
        f"another node is listening at {path}: expected none; stop it, or {_CHOOSE}."
    )
