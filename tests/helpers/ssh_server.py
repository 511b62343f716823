"""A real sshd on this machine, on a port of its own, that lets only a key in that was made for it."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapvit_export.selection.remote import Host

SSHD = shutil.which("sshd") or next((p for p in ("/usr/sbin/sshd", "/usr/local/sbin/sshd") if os.path.exists(p)), None)
IS_MISSING = SSHD is None or shutil.which("ssh") is None
needs_sshd = pytest.mark.skipif(
    IS_MISSING and not os.environ.get("SNAPVIT_REQUIRE_SSHD"), reason="needs an OpenSSH client and server"
)


@contextmanager
def serving(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Host]:
    """Yield a Host while its server runs; `environment`: what sessions get. Keys and settings go into the folder."""
    if IS_MISSING:
        pytest.fail("an OpenSSH client and server are required here and missing")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = ["Port", port, "ListenAddress", "127.0.0.1", "HostKey", folder / "host", "PidFile", "none"]
    settings += ["AuthorizedKeysFile", folder / "authorized", "StrictModes", "no", "UsePAM", "no"]
    settings += ["PasswordAuthentication", "no", "PermitRootLogin", "prohibit-password"]
    if environment:
        settings += ["SetEnv", " ".join(f'"{name}={value}"' for name, value in environment.items())]
    pairs = zip(settings[::2], settings[1::2])
    (folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in pairs))
    os.makedirs("/run/sshd", exist_ok=True) if os.access("/run", os.W_OK) else None
    server = subprocess.Popen([str(SSHD), "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.PIPE)
    key = (folder / "host.pub").read_text().split()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key[0]} {key[1]}\n")
    options = ("-i", str(folder / "user"), "-o", f"UserKnownHostsFile={folder / 'known'}", "-F", "none")
    try:
        _wait_for(port, server)
        yield Host("127.0.0.1", getpass.getuser(), port, sys.executable, options)
    finally:
        server.terminate()
        server.communicate()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(100):
        with socket.socket() as there:
            if there.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.poll() is None, server.stderr and server.stderr.read().decode()
        time.sleep(0.05)
    raise AssertionError("the server did not begin to listen")
