"""The file for spark-submit: the parity check on whatever cluster spark-submit says.

    spark-submit --master spark://host:7077 chronik_repl/spark/submit.py --leader http://leader:9644 a=/data/a b=/data/b

The arguments are those of `chronik parity`. The executors get this package from here (SparkContext.addPyFile); what
they must have is its few dependencies: msgspec, crc32c and cramjam (or ship them with --archives, as Spark's own
documentation shows).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    # spark-submit puts this file's own folder first: there the names of our modules would stand for themselves.
    here = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != here]
    if str(here.parent.parent) not in sys.path:
        sys.path.append(str(here.parent.parent))  # run from a clone that is not installed

    from chronik_repl.errors import ChronikError
    from chronik_repl.spark.commands import EXAMPLES, WHAT, add_arguments, check

    parser = argparse.ArgumentParser(
        prog="submit.py", description=WHAT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    try:
        code = check(parser.parse_args(), None)
    except ChronikError as error:
        print(f"parity: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
