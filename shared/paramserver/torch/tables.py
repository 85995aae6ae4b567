"""Tables of `nn.Embedding(…, sparse=True)`: their gradients as rows, and the rows that a forward pass looks up."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from paramserver.errors import problem
from paramserver.torch.fitting import as_array
from paramserver.types import AnyArray

Lookup = WeakMethod[Callable[[str, Tensor], None]]
"""Called with a table's name and the indices, of any shape, that are about to be looked up in it; weak, as a module may
outlive its optimizer."""


class LazyTables:
    """The tables of a module's sparse embeddings, each announced before a forward pass looks something up in it."""

    def __init__(self, net: Any, params: Mapping[str, Tensor], before_lookup: Lookup) -> None:
        found = _tables(net, params) if isinstance(net, nn.Module) else {}
        if not found:
            hint = "pass the module itself, with nn.Embedding(..., sparse=True) or nn.EmbeddingBag(..., sparse=True)"
            raise problem("invalid_field", "lazy_tables: there is no sparse embedding", hint=hint)
        self.names = frozenset(found)
        self._hooks = [
            module.register_forward_pre_hook(_hook(name, before_lookup), with_kwargs=True)
            for name, modules in found.items()
            for module in modules
        ]

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


def _hook(name: str, before_lookup: Lookup) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def announce(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (tell := before_lookup()) is not None:
            tell(name, args[0] if args else kwargs["input"])

    return announce


def sparse_rows(grads: Mapping[str, Tensor | None]) -> dict[str, tuple[AnyArray, AnyArray]]:
    """Return, by name of the sparse gradients, the row numbers, each once, and the gradients of these rows.

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
