"""Functions that leave their work to ringlab, PyTorch or other packages, and similar but honest functions.

Tests use these functions to show that `check()` and the judge refuse the same ones.
"""

from __future__ import annotations

BORROWED = {
    "ring_attention": "from ringlab import ring_attention\ndef f(x): return ring_attention(x, x, x, ring=None, layout=None)",
    "of the package": "import ringlab\ndef f(x): return ringlab.ring_attention(x, x, x, ring=None, layout=None)",
    "oracle": "from ringlab import oracle\ndef f(x): return oracle.attention(x, x, x).out",
    "by module": "import ringlab\ndef f(x): return ringlab.oracle.attention(x, x, x)",
    "by another name": "from ringlab.oracle import attention as mine\ndef f(x): return mine(x, x, x)",
    "in a helper": "from ringlab import oracle\ndef helper(x): return oracle.attention(x, x, x)\ndef f(x): return helper(x)",
    "in a function inside": "from ringlab import oracle\ndef f(x):\n    def helper(y): return oracle.attention(y, y, y)\n    return helper(x)",
    "in a lambda": "from ringlab import oracle\ndef f(x): return (lambda y: oracle.attention(y, y, y))(x)",
    "by a text": "import importlib\ndef f(x): return getattr(importlib.import_module('ringlab.oracle'), 'atten' + 'tion')(x, x, x)",
    "oracle, inside": "def f(x):\n    import ringlab.oracle as o\n    return o.attention(x, x, x).out",
    "blocks": "from ringlab.blocks import get_block\ndef f(x): return get_block('naive', x).forward(x, x, x)",
    "merge": "from ringlab.merge import Partial, merge\ndef f(x): return merge(Partial(x, x[..., 0]), Partial(x, x[..., 0])).out",
    "schedules": "import ringlab.schedules.ring as r\ndef f(x): return r.anything[0]",
    "contracts": "from ringlab_course.checking.loading import load_exercise\ndef f(x): return load_exercise('01')",
    "an exercise": "from ringlab_course.exercises.e05_emulated_ring import forward\ndef f(x): return forward.anything(x)",
    "conformance": "from ringlab.conformance import check\ndef f(x): return check(x)",
    "a layout": "from ringlab import striped\ndef f(x): return striped(4, 2).P",
    "SDPA": "import torch.nn.functional as F\ndef f(x): return F.scaled_dot_product_attention(x, x, x)",
    "SDPA by name": "from torch.nn.functional import scaled_dot_product_attention\ndef f(x): return scaled_dot_product_attention(x, x, x)",
    "SDPA by a text": "import torch\ndef f(x): return getattr(torch.nn.functional, 'scaled_dot_' + 'product_attention')(x, x, x)",
    "SDPA with gradients": (
        "import torch\ndef f(x):\n    x = x.requires_grad_()\n"
        "    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)"
    ),
    "its operator": "import torch\ndef f(x): return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)",
    "its mathematics": "import torch\ndef f(x): return torch.ops.aten._scaled_dot_product_attention_math(x, x, x)",
    "its backward": (
        "import torch\ndef f(x): return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward("
        "x, x, x, x, x, x[..., 0], 0.0, False)"
    ),
    "MultiheadAttention": "import torch\ndef f(x): return torch.nn.MultiheadAttention(4, 1)(x[0], x[0], x[0])[0]",
    "a Transformer's layer": "import torch\ndef f(x): return torch.nn.TransformerEncoderLayer(4, 1).eval()(x[0])",
    "its decomposition": "import torch\ndef f(x): return torch.ops.aten._scaled_dot_product_attention_math.default.decompose(x, x, x)",
    "its kernel": (
        "import torch\ndef f(x):\n    op, keys = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch._C\n"
        "    return op.redispatch(keys.DispatchKeySet(keys.DispatchKey.CPU), x, x, x)"
    ),
    "nested tensors": (
        "import torch\ndef f(x):\n    n = torch.nested.nested_tensor([x[0, 0], x[0, 0, :2]]).unsqueeze(-1).transpose(1, 2)\n"
        "    return torch.nn.functional.scaled_dot_product_attention(n, n, n)"
    ),
    "ONNX": "import torch\ndef f(x): return torch.onnx.ops.attention(x, x, x)[0]",
    "quantizable attention": (
        "def f(x):\n    from torch.ao.nn.quantizable import MultiheadAttention as M\n    return M(4, 1)(x[0], x[0], x[0])[0]"
    ),
    "quantizable attention, loaded again": (
        "def f(x):\n    import importlib, torch.ao.nn.quantizable.modules.activation as a\n"
        "    return importlib.reload(a).MultiheadAttention(4, 1)(x[0], x[0], x[0])[0]"
    ),
    "the library opened again": (
        "import gc, ringlab_course.judge.removal as o, torch\ndef f(x):\n    getattr(o, '_libraries', []).clear()\n"
        "    gc.collect()\n    return torch.nn.functional.scaled_dot_product_attention(x, x, x)"
    ),
    "JAX": (
        "def f(x):\n    import jax\n    return float(jax.nn.dot_product_attention(x[0].numpy(), x[0].numpy(), x[0].numpy()).sum())"
    ),
    "another package": "from transformers import BertModel as B\ndef f(x): return B.from_pretrained('x')(x)",
    "flex attention's mathematics": (
        "def f(x):\n    from torch._higher_order_ops.flex_attention import math_attention as m\n"
        "    return m(x, x, x, lambda s, *_: s, (), 1.0, {}, (), ())"
    ),
    "flex attention": (
        "from torch.nn.attention.flex_attention import flex_attention\ndef f(x): return flex_attention(x, x, x)"
    ),
}  # fmt: skip


HONEST = {
    "a function of that name": "def scaled_dot_product_attention(q, k, v): return q\ndef f(x): return scaled_dot_product_attention(x, x, x)",
    "another decomposition": "import torch\ndef f(x): return torch.ops.aten.matmul.default.decompose(x, x)",
    "a layout": "from ringlab import contiguous\ndef f(x): return contiguous(4, 2).S",
    "imports that it does not use": "import torch\nfrom ringlab import oracle, ring_attention\ndef f(x):\n    from ringlab import merge\n    return torch.softmax(x, -1)",
    "what the package has elsewhere": "def f(x):\n    from ringlab import Ring\n    from ringlab.errors import ShapeError\n    return Ring.__name__ + ShapeError.__name__",
}  # fmt: skip
