"""Submissions whose answers are tensors that are no plain arrays of numbers, or that change torch itself."""

from __future__ import annotations

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

SUBMISSIONS = {"tensors": {name: "import torch\n" + source for name, source in TENSORS.items()}}
