# expects: check=00.environment:python misconception=whole_version
import sys

import torch


def environment():
    return {"python": tuple(sys.version_info[:3]), "torch": torch.__version__}
