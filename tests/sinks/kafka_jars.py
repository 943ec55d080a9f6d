"""Apache Kafka's jars, from Maven's own cache or fetched into it once."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

VERSION = "4.1.0"
JAVA = 17
FETCH_S = 300.0

POM = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>tests</groupId><artifactId>kafka</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies><dependency>
    <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version>
  </dependency></dependencies>
</project>
"""


@cache
def class_path() -> str | None:
    """Return the class path of the broker; None where Java or Maven is missing or the jars cannot be had."""
    if shutil.which("java") is None or _java() < JAVA:
        return None
    noted = _cache() / f"kafka-{VERSION}.classpath"
    if noted.exists() and all(Path(jar).exists() for jar in noted.read_text().split(":")):
        return noted.read_text()
    found = _ask_maven()
    if found is not None:
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text(found)
    return found


def _ask_maven() -> str | None:
    if shutil.which("mvn") is None:
        return None
    with tempfile.TemporaryDirectory(prefix="pgqueue-maven-") as folder:
        (Path(folder) / "pom.xml").write_text(POM)
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
