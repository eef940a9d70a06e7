"""For all tests: programs that they start hear Ctrl-C, also when the tests themselves run in the background.

A shell starts its background jobs with SIGINT ignored, and that is inherited. A handler of our own is not: children
begin with the default.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
