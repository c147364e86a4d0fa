"""torch-geometric, imported here and nowhere else: it is slow to import, optional, and warns of what is not ours."""

import warnings

from lockstep.errors import UserError

with warnings.catch_warnings():
    # It compiles parts of itself with torch.jit.script, which newer versions of torch call deprecated.
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*", category=DeprecationWarning)
    try:
        from torch_geometric.data import Batch, HeteroData
        from torch_geometric.nn import MessagePassing, SAGEConv
        from torch_geometric.utils import softmax
    except ImportError:
        raise UserError("the cricket recipe needs torch-geometric: pip install 'lockstep-train[cricket]'") from None

__all__ = ["Batch", "HeteroData", "MessagePassing", "SAGEConv", "softmax"]
