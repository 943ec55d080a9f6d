"""The jars of the brokers that are written in Java, from Maven's own cache or fetched into it once."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

KAFKA = ("org.apache.kafka", "kafka_2.13", "4.1.0")
PULSAR = ("org.apache.pulsar", "pulsar-broker", "4.0.1")
JAVA = 17
FETCH_S = 300.0

POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>tests</groupId><artifactId>broker</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies><dependency>
    <groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>
  </dependency></dependencies>
</project>
"""

Artifact = tuple[str, str, str]


@cache
def class_path(artifact: Artifact) -> str | None:
    """Return the class path of the broker; None where Java or Maven is missing or the jars cannot be had."""
    if shutil.which("java") is None or _java() < JAVA:
        return None
    noted = _cache() / f"{artifact[1]}-{artifact[2]}.classpath"
    if noted.exists() and all(Path(jar).exists() for jar in noted.read_text().split(":")):
        return noted.read_text()
    found = _ask_maven(artifact)
    if found is not None:
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text(found)
    return found


def _ask_maven(artifact: Artifact) -> str | None:
    if shutil.which("mvn") is None:
        return None
    with tempfile.TemporaryDirectory(prefix="pgqueue-maven-") as folder:
        (Path(folder) / "pom.xml").write_text(POM.format(*artifact))
        out = Path(folder) / "classpath"
        order = ["mvn", "-q", "-B", "dependency:build-classpath", f"-Dmdep.outputFile={out}"]
        try:
            subprocess.run(order, cwd=folder, capture_output=True, check=True, timeout=FETCH_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
        return out.read_text().strip()


def _java() -> int:
    said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    number = said.partition('version "')[2].partition(".")[0].partition('"')[0]
    return int(number) if number.isdigit() else 0


def _cache() -> Path:
    place = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(place) / "pgqueue-relay"
