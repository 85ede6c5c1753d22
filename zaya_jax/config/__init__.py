"""Configuration: frozen dataclasses, read from YAML. Imports neither jax nor numpy."""

from zaya_jax.config.data import DataConfig as DataConfig
from zaya_jax.config.data import SourceConfig as SourceConfig
from zaya_jax.config.loader import from_dict as from_dict
from zaya_jax.config.loader import load_config as load_config
from zaya_jax.config.loader import to_dict as to_dict
from zaya_jax.config.loader import to_yaml as to_yaml
from zaya_jax.config.lora import LoraConfig as LoraConfig
from zaya_jax.config.model import ModelConfig as ModelConfig
from zaya_jax.config.optimizer import AdamWConfig as AdamWConfig
from zaya_jax.config.optimizer import BalanceConfig as BalanceConfig
from zaya_jax.config.optimizer import MuonConfig as MuonConfig
from zaya_jax.config.optimizer import OptimizerConfig as OptimizerConfig
from zaya_jax.config.optimizer import RoleConfig as RoleConfig
from zaya_jax.config.optimizer import RolesConfig as RolesConfig
from zaya_jax.config.parallel import ParallelConfig as ParallelConfig
from zaya_jax.config.phases import BatchConfig as BatchConfig
from zaya_jax.config.phases import BatchSizeConfig as BatchSizeConfig
from zaya_jax.config.phases import PhaseConfig as PhaseConfig
from zaya_jax.config.phases import ScheduleConfig as ScheduleConfig
from zaya_jax.config.schema import CheckpointConfig as CheckpointConfig
from zaya_jax.config.schema import Config as Config
from zaya_jax.config.schema import EvaluationConfig as EvaluationConfig
from zaya_jax.config.schema import SampleConfig as SampleConfig
from zaya_jax.config.schema import SpikeConfig as SpikeConfig
from zaya_jax.config.schema import TrainConfig as TrainConfig
from zaya_jax.config.table import Table as Table
