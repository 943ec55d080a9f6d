"""A certificate that brokers show on loopback."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sinks.brokers import LOOPBACK


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a key and a certificate for the loopback address, and both in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("broker: no openssl to make a certificate with; install the Debian package openssl")
    folder = tmp_path_factory.mktemp("certificate")
    order = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=broker"
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    names = ["-addext", f"subjectAltName=IP:{LOOPBACK}"]
    subprocess.run(["openssl", *order.split(), *files, *names], check=True, capture_output=True)
    (folder / "both").write_text((folder / "key").read_text() + (folder / "cert").read_text())
    return folder
