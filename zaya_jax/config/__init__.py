"""Configuration: frozen dataclasses, read from YAML. Imports neither jax nor numpy."""

from zaya_jax.config.loader import load_config as load_config
from zaya_jax.config.loader import to_dict as to_dict
from zaya_jax.config.loader import to_yaml as to_yaml
from zaya_jax.config.schema import AdamWConfig as AdamWConfig
from zaya_jax.config.schema import BalanceConfig as BalanceConfig
from zaya_jax.config.schema import CheckpointConfig as CheckpointConfig
from zaya_jax.config.schema import Config as Config
from zaya_jax.config.schema import DataConfig as DataConfig
from zaya_jax.config.schema import EvaluationConfig as EvaluationConfig
from zaya_jax.config.schema import ModelConfig as ModelConfig
from zaya_jax.config.schema import MuonConfig as MuonConfig
from zaya_jax.config.schema import OptimizerConfig as OptimizerConfig
from zaya_jax.config.schema import PhaseConfig as PhaseConfig
from zaya_jax.config.schema import SampleConfig as SampleConfig
from zaya_jax.config.schema import SourceConfig as SourceConfig
from zaya_jax.config.schema import TrainConfig as TrainConfig
from zaya_jax.config.table import Table as Table
