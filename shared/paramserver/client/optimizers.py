"""Server-side optimizers and learning rate schedules, as arguments of `create_model` and `set`.

Names and defaults are those of torch.optim (FTRL: McMahan et al. 2013).  `clip_value` clamps each element of a
gradient, `clip_norm` scales a push down to that 2-norm, `linear_scaling` multiplies the learning rate by the number of
live workers.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from paramserver.client.choices import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(Choice):
    """How the learning rate depends on the number of updates applied to a partition."""

    tag: ClassVar[str] = "kind"
    kind: ClassVar[str] = "constant"
    warmup: int = 0
    """Number of updates over which the rate first rises linearly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Schedule):
    """A constant rate (after the warm-up)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecay(Schedule):
    """The rate is multiplied by `gamma` every `step_size` updates."""

    kind: ClassVar[str] = "step"
    step_size: int
    gamma: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(Schedule):
    """The rate is multiplied by `gamma` at every update."""

    kind: ClassVar[str] = "exponential"
    gamma: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(Schedule):
    """The rate falls to `eta_min` over `t_max` updates, along half a cosine."""

    kind: ClassVar[str] = "cosine"
    t_max: int
    eta_min: float = 0.0


@dataclass(frozen=True, slots=True)
class Optimizer(Choice):
    """Base class of the optimizers, with the arguments that all of them take."""

    tag: ClassVar[str] = "name"
    name: ClassVar[str]
    schedule: Schedule = field(default_factory=Constant, kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    linear_scaling: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """w -= lr * (g + weight_decay * w).

    Here and in `Momentum` and `Nesterov` all but `lr` are keywords, because torch has others in their places.
    """

    name: ClassVar[str] = "sgd"
    lr: float = 1e-3
    _: KW_ONLY
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Momentum(Optimizer):
    """torch.optim.SGD with momentum, dampening 0."""

    name: ClassVar[str] = "momentum"
    lr: float = 1e-3
    _: KW_ONLY
    momentum: float = 0.9
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Nesterov(Optimizer):
    """torch.optim.SGD with `nesterov=True`."""

    name: ClassVar[str] = "nesterov"
    lr: float = 1e-3
    _: KW_ONLY
    momentum: float = 0.9
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Adagrad(Optimizer):
    """torch.optim.Adagrad."""

    name: ClassVar[str] = "adagrad"
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@dataclass(frozen=True, slots=True)
class RMSprop(Optimizer):
    """torch.optim.RMSprop."""

    name: ClassVar[str] = "rmsprop"
    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """torch.optim.Adam; weight decay is added to the gradient."""

    name: ClassVar[str] = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class AdamW(Optimizer):
    """torch.optim.AdamW; weight decay acts on the parameter itself."""

    name: ClassVar[str] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


@dataclass(frozen=True, slots=True)
class FTRL(Optimizer):
    """FTRL-Proximal (McMahan et al. 2013): sparse solutions through `l1`."""

    name: ClassVar[str] = "ftrl"
    lr: float = 1e-2
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0


@dataclass(frozen=True, slots=True)
class Sum(Optimizer):
    """w += g: the server only adds what is pushed; without a rate, only the clipping has an effect."""

    name: ClassVar[str] = "sum"
