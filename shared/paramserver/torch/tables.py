"""Tables of `nn.Embedding(…, sparse=True)`: their gradients as rows, and the rows that a forward pass looks up."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias
from weakref import WeakMethod

import numpy as np
import torch
from torch import Tensor, nn

from paramserver.client.rows import Ids
from paramserver.errors import problem
from paramserver.torch.fitting import as_array
from paramserver.types import AnyArray

RowGradients: TypeAlias = dict[str, tuple[Ids, AnyArray]]
"""By parameter name: row numbers, each once, and the gradients of these rows."""
NONE: Final[Ids] = np.empty(0, np.int64)
OLD_ROW: Final = (
    "opt.zero_grad() after each step; call the module, not its forward(); "
    "make the optimizer before a compiled module first runs"
)
Lookup = WeakMethod[Callable[[str, Tensor, Tensor], None]]
"""Called with a table's name, the table, and the indices, of any shape, that are about to be looked up in it; weak, as
a module may outlive its optimizer."""


class LazyTables:
    """The tables of a module's sparse embeddings, each announced before a forward pass looks something up in it.

    `pulled` has the rows of each that were pulled since the last step, ascending.
    """

    def __init__(self, net: Any, params: Mapping[str, Tensor], before_lookup: Lookup) -> None:
        found = _tables(net, params) if isinstance(net, nn.Module) else {}
        if not found:
            hint = "pass the module itself, with nn.Embedding(..., sparse=True) or nn.EmbeddingBag(..., sparse=True)"
            raise problem("invalid_field", "lazy_tables: there is no sparse embedding", hint=hint)
        self.names = frozenset(found)
        self.pulled: dict[str, Ids] = {}
        self._hooks = [
            module.register_forward_pre_hook(_Announcement(name, before_lookup), with_kwargs=True)
            for name, modules in found.items()
            for module in modules
        ]

    def wanted(self, name: str, indices: Tensor, *, again: bool) -> Ids:
        """Return the rows to pull for a look-up, each once; of those pulled since the last step only if `again`."""
        rows: Ids = as_array(indices.detach().unique()).astype(np.int64)
        return rows if again else np.setdiff1d(rows, self.pulled.get(name, NONE))

    def note(self, name: str, rows: Ids) -> None:
        """Note that these rows have been pulled."""
        self.pulled[name] = np.union1d(self.pulled.get(name, NONE), rows)

    def check(self, grads: Mapping[str, Tensor | None], sparse: RowGradients) -> None:
        """Raise RequestError (`invalid_field`) if a table's gradient is dense, or of rows whose values were old."""
        for name in self.names:
            if grads[name] is not None and name not in sparse:
                why = f"'{name}' is pulled by rows, but has a dense gradient: the module uses it for more than look-ups"
                raise problem("invalid_field", why, hint="lazy_tables=False, or sparse=False for it", where=name)
            old = np.setdiff1d(sparse[name][0], self.pulled.get(name, NONE)) if name in sparse else NONE
            if old.size:
                why = f"row {old[0]} of '{name}' has a gradient, but was not pulled since the last step"
                raise problem("invalid_field", why, hint=OLD_ROW, where=name)

    def remove(self) -> None:
        """Announce nothing any more."""
        for hook in self._hooks:
            hook.remove()


def _tables(net: nn.Module, params: Mapping[str, Tensor]) -> dict[str, list[nn.Module]]:
    """Return the sparse embeddings by the name of their table, without tables that other modules have, too."""
    names = {id(p): name for name, p in params.items()}
    found: dict[str, list[nn.Module]] = {}
    shared = set[str]()
    for module in net.modules():
        lookups = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for p in module.parameters(recurse=False):
            if (name := names.get(id(p))) is None:
                continue
            if lookups:
                found.setdefault(name, []).append(module)
            else:
                shared.add(name)
    return {name: modules for name, modules in found.items() if name not in shared}


class _Announcement:
    """A hook before a forward pass.  That of a copied or unpickled module, which no cluster trains, does nothing."""

    def __init__(self, name: str, before_lookup: Lookup | None = None) -> None:
        self._name, self._before_lookup = name, before_lookup

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tell = self._before_lookup and self._before_lookup()
        if tell:
            tell(self._name, module.weight, args[0] if args else kwargs["input"])

    def __reduce__(self) -> tuple[type["_Announcement"], tuple[str]]:
        return _Announcement, (self._name,)


def sparse_rows(grads: Mapping[str, Tensor | None]) -> RowGradients:
    """Return the sparse gradients by rows.

    Raises one RequestError (`invalid_dtype`) that lists all that are sparse in another way than by rows.
    """
    sparse = {n: g.detach() for n, g in grads.items() if g is not None and g.layout != torch.strided}
    wrong = {n: g.layout for n, g in sparse.items() if g.layout != torch.sparse_coo or g.sparse_dim() != 1}
    if wrong:
        raise problem(
            "invalid_dtype",
            f"gradients must be dense, or sparse by rows; these are not: {', '.join(map(repr, wrong))}",
            hint="set p.grad = p.grad.to_dense() before the step",
            errors=tuple(
                {"code": "invalid_dtype", "detail": f"'{n}' has a gradient in {layout}", "where": n}
                for n, layout in wrong.items()
            ),
        )
    summed = {n: g.coalesce() for n, g in sparse.items()}
    return {n: (as_array(g.indices()[0]), as_array(g.values())) for n, g in summed.items()}
