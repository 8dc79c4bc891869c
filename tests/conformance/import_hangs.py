"""A module whose import never ends."""

from __future__ import annotations

import time

while True:
    time.sleep(0.1)
