"""The held-out loss: cross-entropy on text the model is not trained on."""

import functools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from zaya_jax.config import Config
from zaya_jax.data.loading.batches import HeldoutText, heldout_text
from zaya_jax.data.loading.run_plan import heldout_phase
from zaya_jax.data.loading.sources import Prepared, Source
from zaya_jax.evaluate.evaluator import ModelSnapshot

# Batches in flight. CPU devices of several processes can deadlock with many (up to 32): each process then waits for a
# collective that the other has not started.
_AHEAD = 2


class HeldoutLoss(NamedTuple):
    """Sums over held-out tokens: `nats` of cross-entropy and the number of `tokens` predicted."""

    nats: float
    tokens: int

    @property
    def nats_per_token(self) -> float:
        """Mean cross-entropy."""
        return self.nats / max(self.tokens, 1)

    def bits_per_byte(self, text_bytes: int) -> float:
        """Cross-entropy per byte of text, for tokens that stand for `text_bytes` bytes."""
        return self.nats / math.log(2) / max(text_bytes, 1)

    def plus(self, sums: Mapping[str, jax.Array]) -> "HeldoutLoss":
        """Add the sums of another batch, waiting for the devices."""
        host = jax.device_get(sums)
        return HeldoutLoss(self.nats + host["loss"].item(), self.tokens + round(host["tokens"].item()))


class HeldoutEvaluator:
    """Computes the held-out loss of each source, over the same batches at each evaluation of a phase."""

    name = "heldout_loss"
    label = "held-out"
    ranks_checkpoints = True

    def __init__(self, config: Config, prepared: Prepared) -> None:
        """Read the held-out batches of a run's sources into memory."""
        self._config, self._prepared, self._phase = config, prepared, len(config.phases) - 1
        read = functools.cache(self._read)
        self.texts: list[dict[str, HeldoutText]] = []  # by phase and source; phases with the same rows share them
        for phase in range(len(config.phases)):
            first = {name: self._first_alike(source, phase) for name, source in prepared.sources.items()}
            self.texts.append({name: text for name, at in first.items() if (text := read(name, at)) is not None})
        self._batches = [{name: text.loaded for name, text in texts.items()} for texts in self.texts]
        self.losses: dict[str, HeldoutLoss] = {}  # of the last evaluation, by source that has held-out tokens

    def _first_alike(self, source: Source, phase: int) -> int:
        """Return the first phase that packs a source as `phase` does."""
        settings = [heldout_phase(self._config, source, index) for index in range(phase + 1)]
        keys = [each and (each.context, each.packing, each.over_length, each.template) for each in settings]
        return keys.index(keys[phase])

    def _read(self, name: str, phase: int) -> HeldoutText | None:
        return heldout_text(self._config, self._prepared, name, self._config.evaluation.batches, phase)

    @property
    def compressors(self) -> dict[str, float]:
        """Nats per held-out token of the text corpus by compressor; {} before an evaluation and for other sources."""
        if not self._prepared.baselines or not self.total.tokens:
            return {}
        (text,) = self.texts[self._phase].values()  # only the text corpus has baselines
        factor = math.log(2) * text.text_bytes / self.total.tokens
        return {name: bits * factor for name, bits in self._prepared.baselines.items()}

    @property
    def total(self) -> HeldoutLoss:
        """The loss of the last evaluation, over the held-out text of all sources."""
        losses = self.losses.values()
        return HeldoutLoss(sum(loss.nats for loss in losses), sum(loss.tokens for loss in losses))

    def evaluate(self, model: ModelSnapshot) -> dict[str, Any]:
        """Return `heldout_loss` in nats/token, and with several sources `heldout_loss_by_source`."""
        if model.phase is not None:
            self._phase = model.phase
        losses = {name: heldout_loss(model, batches) for name, batches in self._batches[self._phase].items()}
        self.losses = {name: loss for name, loss in losses.items() if loss.tokens}
        scores: dict[str, Any] = {self.name: self.total.nats_per_token}
        if len(self.losses) > 1:
            scores[f"{self.name}_by_source"] = {name: loss.nats_per_token for name, loss in self.losses.items()}
        return scores


def heldout_loss(model: ModelSnapshot, batches: Iterable[Mapping[str, np.ndarray]]) -> HeldoutLoss:
    """Sum the loss over `batches`."""
    total = HeldoutLoss(0.0, 0)
    running: deque[Any] = deque()
    for batch in batches:
        running.append(model.loss(batch))
        if len(running) > _AHEAD:
            total = total.plus(running.popleft())
    return functools.reduce(HeldoutLoss.plus, running, total)
