"""Trains PyTorch modules on a cluster, with `ParameterServerOptimizer` in place of `torch.optim.Adam`.

    import paramserver as ps
    opt = ps.torch.ParameterServerOptimizer(net, "http://localhost:8700/models/demo", optimizer=ps.Adam(lr=1e-3))

Needs PyTorch, which is an extra: `pip install '.[torch]'` in a checkout.
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError("paramserver.torch needs PyTorch: in a checkout, pip install '.[torch]'", name="torch")

from paramserver.torch.optimizer import ParameterServerOptimizer

__all__ = ["ParameterServerOptimizer"]
