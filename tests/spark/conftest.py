"""One Spark session for all tests of this room: it costs more to start than most of them to run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from chronik_repl.spark.session import QUICK_JVM, SparkMissing, open_session

os.environ.setdefault("JDK_JAVA_OPTIONS", QUICK_JVM)  # for the JVMs that tests start themselves, too


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    try:
        session = open_session("local[2]", app="chronik tests")
    except SparkMissing as error:
        pytest.skip(str(error))
    yield session
    session.stop()
