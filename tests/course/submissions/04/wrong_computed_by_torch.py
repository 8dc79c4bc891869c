# expects: check=04.softmax:work misconception=computed_by_torch
import torch
import triton
import triton.language as tl


def softmax(x, out, columns):
    result = torch.softmax(x[:, :columns].float(), -1).nan_to_num(0.0)
    out[:, :columns] = result.to(out.dtype)
    return out
