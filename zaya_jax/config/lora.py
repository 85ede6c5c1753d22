"""Low-rank adapters, trained in place of the parameters."""

from dataclasses import dataclass

from zaya_jax.config.checks import require, require_positive


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of attention and expert matrices (arXiv 2106.09685): W + (alpha / rank)·A·B."""

    rank: int
    alpha: float

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        require(self.rank >= 1, "lora.rank", self.rank, "at least 1")
        require_positive("lora", self, "alpha")

    @property
    def scale(self) -> float:
        """Of the product A·B."""
        return self.alpha / self.rank
