"""A real S3 server, SeaweedFS, on loopback, for the duration of a test."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.store import S3Store

_BESIDE = Path(sys.executable).parent / "weed"
EXECUTABLE = str(_BESIDE) if _BESIDE.exists() else shutil.which("weed")

ACCESS_KEY = "penstock-test"
SECRET_KEY = "penstock-test-secret"
BUCKET = "blocks"
PUBLIC_BUCKET = "public"  # anyone may read and write

_LOG = "weed.log"
_PARTS = ("master", "volume", "filer", "s3")


def free_ports(count: int) -> list[int]:
    """Distinct ports: all of them stay bound until the last one is found."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for taken in sockets:
            taken.bind(("127.0.0.1", 0))
        return [int(taken.getsockname()[1]) for taken in sockets]


class S3Server:
    """Keeps its ports and its folder, so it can be killed and started again."""

    def __init__(self, folder: Path, *, volume_mib: int = 64) -> None:
        """The server has 64 volumes of `volume_mib` each."""
        self.folder = folder
        self._volume_mib = volume_mib
        folder.mkdir(parents=True, exist_ok=True)
        ports = iter(free_ports(2 * len(_PARTS)))
        self._ports = {part: (next(ports), next(ports)) for part in _PARTS}
        self._process: subprocess.Popen[bytes] | None = None
        self._write_identities()
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3'][0]}"

    def url(self, bucket: str = BUCKET, prefix: str = "") -> str:
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    def start(self) -> None:
        assert EXECUTABLE is not None
        options = []
        for part, (port, grpc) in self._ports.items():
            options += [f"-{part}.port={port}", f"-{part}.port.grpc={grpc}"]
        with (self.folder / _LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(EXECUTABLE, "-logtostderr", "server", "-filer", "-s3"),
                    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder}"),
                    *options,
                    f"-s3.config={self.folder / 'identities.json'}",
                    f"-s3.localSocket={self.folder / 's3.sock'}",
                    f"-filer.localSocket={self.folder / 'filer.sock'}",
                    # Missing buckets must stay missing, and no traffic may leave loopback.
                    *("-s3.autoCreateBucket=false", "-master.telemetry=false"),
                    *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.electionTimeout=1s"),
                    *(f"-master.volumeSizeLimitMB={self._volume_mib}", "-volume.max=64"),
                    *("-volume.minFreeSpace=1", "-volume.preStopSeconds=0"),
                ],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._await_buckets()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        for part, (_, grpc) in self._ports.items():  # it ignores the localSocket options for these
            Path(f"/tmp/seaweedfs-{part}-grpc-{grpc}.sock").unlink(missing_ok=True)

    def _write_identities(self) -> None:
        key = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        everyone = [f"{verb}:{PUBLIC_BUCKET}" for verb in ("Read", "Write", "List")]
        identities = [
            {"name": "penstock", "credentials": [key], "actions": ["Admin"]},
            {"name": "anonymous", "actions": everyone},
        ]
        (self.folder / "identities.json").write_text(json.dumps({"identities": identities}))

    def _await_buckets(self) -> None:
        end = time.monotonic() + 60
        wanted = [BUCKET, PUBLIC_BUCKET]
        while wanted and time.monotonic() < end:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            if self._create(wanted[0]) and self._keeps(wanted[0]):
                wanted.pop(0)
            else:
                time.sleep(0.1)
        if wanted:
            log = (self.folder / _LOG).read_text(errors="replace")
            raise RuntimeError(f"weed did not start: {log[-4000:]}")

    def _store(self, bucket: str) -> S3Store:
        return S3Store(
            bucket,
            endpoint=self.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )

    def _create(self, bucket: str) -> bool:
        url = obstore.sign(self._store(bucket), "PUT", "", timedelta(minutes=1))
        request = urllib.request.Request(url, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except urllib.error.HTTPError as error:
            with error:
                return error.code == 409  # it exists already
        except OSError:
            return False

    def _keeps(self, bucket: str) -> bool:
        """Whether the bucket accepts objects: its volumes start later than the bucket."""
        try:
            obstore.put(self._store(bucket), "ready", b"yes")
        except Exception:
            return False
        return True
