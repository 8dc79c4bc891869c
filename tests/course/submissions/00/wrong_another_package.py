# expects: check=00.environment:torch misconception=another_package
import sys

import numpy as np


def environment():
    return {"python": tuple(sys.version_info[:2]), "torch": np.__version__}
