# expects: check=00.environment:python misconception=version_as_text
import sys

import torch


def environment():
    return {"python": ".".join(map(str, sys.version_info[:2])), "torch": torch.__version__}
