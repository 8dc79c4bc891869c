"""Submissions that are strange and right: what they earn shows that the judge refuses no more than it must."""

from __future__ import annotations

NUMPY = {
    "answers a subclass": "import numpy as np\nclass Mine(np.ndarray): pass\ndef double(x): return (2 * x).view(Mine)",
    "answers backwards, twice": "def double(x): return (2 * x)[::-1][::-1]",
    "answers columns first": "import numpy as np\ndef double(x): return np.asfortranarray(2 * x)",
    "answers what cannot be written": "def double(x):\n    y = 2 * x\n    y.flags.writeable = False\n    return y",
    "answers a masked array without a mask": "import numpy as np\ndef double(x): return np.ma.array(2 * x)",
    "answers a dtype with metadata": "import numpy as np\ndef double(x): return (2 * x).astype(np.dtype(x.dtype, metadata={'a': 1}))",
    "answers a tuple of one": "def double(x): return (2 * x,)",
    "answers into its argument": "def double(x):\n    x *= 2\n    return x",
    "prints a megabyte": "def double(x):\n    print('x' * (1 << 20))\n    return 2 * x",
    "warns": "import numpy as np\ndef double(x):\n    np.log(-np.ones(3))\n    return 2 * x",
    "keeps a thread": """
import threading, time
def double(x):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return 2 * x
""",
    "keeps a trace and a profile": """
import sys
def double(x):
    sys.settrace(lambda *a: None)
    sys.setprofile(lambda *a: None)
    return 2 * x
""",
    "writes a file of its own": """
def double(x):
    with open("/tmp/mine", "wb") as file: file.write(x.tobytes())
    return 2 * x
""",
    "calls a function of C": """
import ctypes
def double(x):
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda n: 2 * n)
    return callback(1) * x
""",
    "recurses a little": "def double(x, n=500): return 2 * x if n == 0 else double(x, n - 1)",
}

TORCH = {
    "answers what has a gradient": "def double(x): return 2 * x.clone().requires_grad_()",
    "answers a parameter": "def double(x): return torch.nn.Parameter(2 * x)",
    "answers a subclass of tensors": "class Mine(torch.Tensor): pass\ndef double(x): return (2 * x).as_subclass(Mine)",
    "answers a view turned around": "def double(x): return (2 * x).flip(0).flip(0).T.contiguous().T",
    "answers a negative view": "def double(x): return torch._neg_view(-2 * x)",
    "answers inside of an inference": "@torch.inference_mode()\ndef double(x): return 2 * x",
    "answers part of something larger": "def double(x): return torch.stack([x, 2 * x, x])[1]",
    "answers with NumPy": "def double(x): return 2 * x.numpy()",
}

HONEST = {
    "NumPy": NUMPY,
    "torch": {name: "import torch\n" + source for name, source in TORCH.items()},
}
