"""Submissions whose answers are strange objects: arrays that lie, pickles, numbers that are none."""

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

SUBMISSIONS = {
    "evil array subclasses": EVIL,
    "arrays that lie about their bytes": LYING,
    "odd values": NUMBERS,
    "pickles": PICKLES,
}
