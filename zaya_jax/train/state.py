"""Everything a run is, between two steps."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zaya_jax.config import Config, ModelConfig, ParallelConfig
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import first_step
from zaya_jax.model.layers import Role
from zaya_jax.model.lora import adapter_roles, adapter_shapes, draw_adapters
from zaya_jax.model.tree import Arrays, balancing_biases, fused, parameters, roles, shapes
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.target import Target
from zaya_jax.optim.balance import make_balancer
from zaya_jax.optim.build import make_optimizer
from zaya_jax.parallel.layout import Layout, make_layout
from zaya_jax.parallel.mesh import AnyMesh, make_mesh
from zaya_jax.train.spikes import LossHistory, empty_history


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of training, a pytree.

    Attributes:
      params: fp32 masters by name, of all parameters or of adapters alone; the loss moves them.
      balance: fp32 balancing biases by name; the load moves them.
      opt_state: of `params`.
      balance_state: of `balance`.
      step: int32, steps done, skipped ones included.
      skipped: int32, steps skipped in a row just now.
      recent: what the last steps that were not skipped had, to tell a spike by.
      rng: key of whatever is drawn at random beside data and initialisation.
    """

    params: Arrays
    balance: Arrays
    opt_state: Any
    balance_state: Any
    step: jax.Array
    skipped: jax.Array
    recent: LossHistory
    rng: jax.Array


@dataclasses.dataclass(frozen=True)
class PhaseSpec:
    """What is fixed over a phase: the abstract model, the transforms, the layout asked for.

    `roles` are those of all parameters that there are, `trained` the shapes of those that the loss moves: of the
    model's, or of adapters that stand beside them. `target` is what is compiled for: where None, the mesh's first
    device.
    """

    model: Zaya
    remat: Remat
    parallel: ParallelConfig
    roles: dict[str, Role]
    trained: dict[str, tuple[int, ...]]
    optimizer: optax.GradientTransformation
    balancer: optax.GradientTransformation
    target: Target | None = None


def make_blueprint(config: Config, phase: int = 0, target: Target | None = None) -> PhaseSpec:
    """The blueprint of a phase of a configured run; nothing is allocated."""
    model = _abstract_model(config.model_of(config.phases[phase]))
    every, trained = roles(model), shapes(model)
    if config.lora is not None:
        trained = adapter_shapes(trained, every, config.lora.rank)
        every |= adapter_roles(every)
    moved = dataclasses.replace(config.optimizer, matrices=config.matrices)
    optimizer = make_optimizer(moved, {name: every[name] for name in trained}, fused(model))
    one = config.phases[phase]
    return PhaseSpec(model, config.remat_of(one), config.parallel_of(one), every, trained, optimizer,
                     make_balancer(config.optimizer.balance), target)  # fmt: skip


def mesh_of(config: Config, phase: int) -> Mesh:
    """The mesh of a phase over all devices of this job."""
    one = config.phases[phase]
    return make_mesh(config.parallel_of(one), where=config.parallel_key(one))


def layout_of(config: Config, blueprint: PhaseSpec, mesh: AnyMesh) -> Layout:
    """How the phase that `blueprint` is of lies on `mesh`."""
    everything = {**shapes(blueprint.model), **blueprint.trained}
    exact = () if config.lora is None else blueprint.trained.keys()
    return make_layout(blueprint.parallel, mesh, everything, blueprint.roles, config.train.compute_dtype, exact,
                       blueprint.target)  # fmt: skip


@functools.lru_cache(maxsize=8)
def _abstract_model(config: ModelConfig) -> Zaya:
    return jax.eval_shape(functools.partial(Zaya, config), jax.random.key(0))


def init_state(config: Config, blueprint: PhaseSpec) -> TrainState:
    """The state before the first step, drawn from `config.seed`; traceable."""
    key = jax.random.split(jax.random.key(config.seed))[0]
    model, dtype = Zaya(config.model, key), accumulation_dtype(config.train.compute_dtype)
    drawn = parameters(model) if config.lora is None else draw_adapters(key, blueprint.trained, dtype)
    params, balance = ({name: x.astype(dtype) for name, x in kind.items()} for kind in (drawn, balancing_biases(model)))
    return TrainState(
        params=params,
        balance=balance,
        opt_state=blueprint.optimizer.init(params),
        balance_state=blueprint.balancer.init(balance),
        **init_counters(config),
    )


def init_counters(config: Config) -> dict[str, Any]:
    """What of the state is not learned, before the first step; traceable."""
    return {
        "step": jnp.asarray(first_step(config), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
        "recent": empty_history(config.train.spike),
        "rng": jax.random.split(jax.random.key(config.seed))[1],
    }
