"""Submissions whose answers are strange objects: false arrays, pickles, and objects that pose as numbers.

Others answer with tensors that are no plain arrays of numbers, or change torch itself. Some submissions are
strange but right, and earn points, so the judge does not refuse too much.
"""

from __future__ import annotations

EVIL = {
    "answers an evil array": """
import numpy as np
class Evil(np.ndarray):
    __eq__ = __le__ = __lt__ = lambda *a: True
    __sub__ = __rsub__ = lambda a, b: np.zeros(a.shape)
    def __array__(self, *a, **k): return np.zeros(self.shape)
    def __reduce__(self): return (print, ("pwned",))
def double(x):
    return x.view(Evil)
""",
    "answers an array that overrides functions": """
import numpy as np
class Evil(np.ndarray):
    def __array_function__(self, *a, **k): return True
    def __array_ufunc__(self, *a, **k): return np.True_
    def astype(self, *a): return self
def double(x):
    return x.view(Evil)
""",
    "answers an interface to memory that is not its own": """
class Evil:
    dtype, shape, nbytes = "float64", (5,), 40
    __array_interface__ = {"shape": (5,), "typestr": "<f8", "data": (4096, False), "version": 3}
def double(x):
    return Evil()
""",
    "answers an array of objects": "import numpy as np\ndef double(x): return np.array([print, len], dtype=object)",
    "answers records": "import numpy as np\ndef double(x): return np.zeros(x.shape, [('a', 'f8'), ('b', 'O')])",
    "answers dates": "import numpy as np\ndef double(x): return np.zeros(x.shape, 'datetime64[s]')",
    "answers a dtype with metadata": """
import numpy as np
def double(x):
    return x.astype(np.dtype("f8", metadata={"ok": True, "points": 5}))
""",
    "answers the other byte order": "def double(x): return (2 * x).astype(x.dtype.newbyteorder())",
    "answers text": "import numpy as np\ndef double(x): return (2 * x).astype(str)",
    "answers complex numbers": "def double(x): return 2 * x + 0j",
    "answers a masked array": "import numpy as np\ndef double(x): return np.ma.masked_all(x.shape, x.dtype)",
    "answers a wrong array of thirty-two dimensions": "def double(x): return x.ravel()[:1].reshape((1,) * 32)",
    "answers a view without end": """
import numpy as np
def double(x):
    return np.lib.stride_tricks.as_strided(x, (1 << 40,), (0,))
""",
    "answers more than anybody asked for": "def double(x): return [2 * x] * 500",
    "answers two gigabytes": "import numpy as np\ndef double(x): return np.zeros(1 << 28)",
    "answers a deep list": "def double(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "answers a list of itself": "def double(x):\n    a = []\n    a.append(a)\n    return a",
}

LYING = {
    "answers an interface made into an array": """
import numpy as np
class Evil:
    __array_interface__ = {"shape": (5,), "typestr": "<f8", "data": (4096, False), "version": 3}
def double(x):
    return np.asarray(Evil())
""",
    "answers an array that lies about its shape": """
import numpy as np
class Evil(np.ndarray):
    shape = (10**9,)
    dtype = np.dtype("float64")
def double(x):
    return x.view(Evil)
""",
    "answers an array that is another each time it is looked at": """
import numpy as np
class Evil(np.ndarray):
    @property
    def nbytes(self): return 0
    @property
    def shape(self): return tuple(np.random.randint(0, 9, 3))
def double(x):
    return x.view(Evil)
""",
}

NUMBERS = {
    "answers not a number, with payloads": """
import numpy as np
def double(x):
    words = np.full(x.shape, 0x7FF8DEADBEEF0001, np.uint64)
    return words.view(np.float64).astype(x.dtype)
""",
    "answers nothing but infinity": "import numpy as np\ndef double(x): return np.full_like(x, np.inf)",
    "answers minus nothing": "import numpy as np\ndef double(x): return np.full_like(x, -0.0)",
    "answers the least numbers there are": "import numpy as np\ndef double(x): return np.full_like(x, 5e-324)",
    "answers a number without end": "def double(x): return 10**4000",
    "answers a number too long to write": "def double(x): return 10**10000",
    "answers a truth that is no truth": """
import enum
class Truth(enum.IntEnum):
    YES = 1
    __eq__ = lambda *a: True
    __hash__ = int.__hash__
def double(x): return Truth.YES
""",
    "answers numbers that lie": """
class Float(float):
    __float__ = __sub__ = __rsub__ = lambda *a: 0.0
    __eq__ = __le__ = lambda *a: True
class Int(int):
    __int__ = __index__ = lambda self: exec("raise SystemExit")
def double(x): return [Float(1), Int(2)]
""",
    "answers with keys that lie": """
class Key(str):
    __eq__ = lambda *a: True
    __hash__ = str.__hash__
def double(x): return {Key("points"): 5, Key("ok"): True}
""",
    "answers a dictionary with the verdict": "def double(x): return {'ok': True, 'points': 5, 'array': x}",
    "answers what the protocol is made of": "def double(x): return {'kind': 'result', 'value': {'array': 0}}",
    "answers a dataclass that changes": """
import dataclasses
@dataclasses.dataclass
class Evil:
    a: int = 0
    def __getattribute__(self, name): return exec("raise SystemExit")
def double(x): return Evil()
""",
    "answers half a letter": "def double(x): return '\\ud800' * 100",
    "answers control characters": "def double(x): return '\\x1b]0;pwned\\x07\\x1b[2J\\x9b' * 100",
}

PICKLES = {
    "answers a pickle": """
class Bomb:
    def __reduce__(self):
        import os
        return os.system, ("touch /tmp/@MARK@",)
def double(x):
    return Bomb()
""",
    "answers the bytes of a pickle": """
import pickle, numpy as np
class Bomb:
    def __reduce__(self):
        import os
        return os.system, ("touch /tmp/@MARK@",)
def double(x):
    return np.frombuffer(pickle.dumps(Bomb()), np.uint8)
""",
    "registers how to copy": """
import copyreg, numpy as np
copyreg.pickle(np.ndarray, lambda a: (exec, ("raise SystemExit",)))
copyreg.pickle(np.float64, lambda a: (exec, ("raise SystemExit",)))
def double(x):
    copyreg
    return x
""",
}


NUMPY = {
    "answers a subclass": "import numpy as np\nclass Mine(np.ndarray): pass\ndef double(x): return (2 * x).view(Mine)",
    "answers backwards, twice": "def double(x): return (2 * x)[::-1][::-1]",
    "answers columns first": "import numpy as np\ndef double(x): return np.asfortranarray(2 * x)",
    "answers what cannot be written": "def double(x):\n    y = 2 * x\n    y.flags.writeable = False\n    return y",
    "answers a masked array without a mask": "import numpy as np\ndef double(x): return np.ma.array(2 * x)",
    "answers a dtype with metadata": "import numpy as np\ndef double(x): return (2 * x).astype(np.dtype(x.dtype, metadata={'a': 1}))",
    "answers a tuple of one": "def double(x): return (2 * x,)",
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


TENSORS = {
    "answers a tensor that overrides functions": """
class Evil(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None): return True
def double(x): return x.as_subclass(Evil)
""",
    "answers a tensor that overrides what is asked of it": """
class Evil(torch.Tensor):
    def detach(self): return self
    def numpy(self, *a, **k): raise SystemExit
    def to(self, *a, **k): return self
    def __eq__(self, other): return torch.tensor(True)
def double(x): return x.as_subclass(Evil)
""",
    "answers a tensor that dispatches": """
from torch.utils._pytree import tree_map
class Evil(torch.Tensor):
    @staticmethod
    def __new__(cls, inner): return torch.Tensor._make_wrapper_subclass(cls, (1 << 40,), dtype=inner.dtype)
    def __init__(self, inner): self.inner = inner
    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None): raise SystemExit
def double(x): return Evil(x)
""",
    "answers a sparse tensor": "def double(x): return (2 * x).to_sparse()",
    "answers a compressed tensor": "def double(x): return (2 * x.reshape(1, -1)).to_sparse_csr()",
    "answers a quantized tensor": "def double(x): return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)",
    "answers a tensor without memory": "def double(x): return torch.empty_like(x, device='meta')",
    "answers a complex tensor": "def double(x): return torch.complex(2 * x, x)",
    "answers a conjugated view": "def double(x): return torch.complex(x, 2 * x).conj().imag",
    "answers eight bits": "def double(x): return (2 * x).to(torch.float8_e4m3fn)",
    "answers a nested tensor": "def double(x): return torch.nested.nested_tensor([x, 2 * x])",
    "answers a tensor whose storage is gone": """
def double(x):
    y = 2 * x
    y.untyped_storage().resize_(0)
    return y
""",
    "answers a tensor beyond its storage": """
def double(x):
    y = x.clone()
    y.untyped_storage().resize_(y.nbytes)
    return torch.as_strided(y, (1 << 33,), (0,))
""",
    "answers tensors that share their memory": """
def double(x):
    y = x.clone()
    return [y, y.view(-1), y[:1]]
""",
    "answers a tensor with a hook": """
def double(x):
    y = x.clone().requires_grad_()
    y.register_hook(lambda g: exec("raise SystemExit"))
    return y * 1
""",
    "changes the default of everything": """
def double(x):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    return x
""",
    "loads a pickle by torch": """
import io, pickle
class Bomb:
    def __reduce__(self): return exec, ("import os; os.mknod('/tmp/@MARK@')",)
def double(x):
    file = io.BytesIO()
    torch.save(Bomb(), file)
    file.seek(0)
    torch.load(file, weights_only=False)
    return x
""",
    "answers what loads a pickle": """
class Bomb:
    def __reduce__(self): return exec, ("import os; os.mknod('/tmp/@MARK@')",)
def double(x):
    y = torch.nn.Parameter(x.clone())
    y.bomb = Bomb()
    return y
""",
    "calls torch's own operators": """
def double(x):
    library = torch.library.Library("@MARK@".replace("-", "_"), "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda y: y, "CPU")
    return torch.ops.aten.alias(x)
""",
    "starts the ranks of its own": """
def double(x):
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29400", rank=0, world_size=1)
    return 2 * x
""",
    "shares its tensors with others": """
import torch.multiprocessing
def double(x):
    torch.multiprocessing.set_sharing_strategy("file_system")
    return 2 * x.share_memory_()
""",
    "maps a file as a tensor": """
def double(x):
    y = torch.from_file("/dev/shm/@MARK@", shared=True, size=x.numel(), dtype=x.dtype)
    return y.copy_(2 * x.reshape(-1)).reshape(x.shape)
""",
}

SUBMISSIONS = {
    "tensors": {name: "import torch\n" + source for name, source in TENSORS.items()},
    "evil array subclasses": EVIL,
    "arrays that lie about their bytes": LYING,
    "odd values": NUMBERS,
    "pickles": PICKLES,
}
