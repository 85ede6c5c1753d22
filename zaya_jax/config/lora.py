"""Low-rank adapters, trained instead of the parameters."""

from dataclasses import dataclass

from zaya_jax.config.bounds import Positive


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of attention and expert matrices (arXiv 2106.09685): W + (alpha / rank)·A·B."""

    rank: Positive[int]  # width of A and B
    alpha: Positive[float]  # scale of the product A·B, divided by the rank

    @property
    def scale(self) -> float:
        """The factor alpha / rank on the product A·B."""
        return self.alpha / self.rank
