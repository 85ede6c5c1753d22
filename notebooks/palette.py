"""Colours of the notebooks, each with one meaning, and the style of their figures."""

import matplotlib.pyplot as plt

# Those of Okabe and Ito, which colour-blind readers can tell apart.
ZAYA = "#0072B2"  # ZAYA1 or a part of it, such as Muon; also: after training
BASELINE = "#E69F00"  # what it is compared with; also: before training
WRONG = "#D55E00"  # what must not happen, such as a leak or a missing halo
QUERY, KEY, VALUE = "#CC79A7", "#009E73", "#56B4E9"
GREY = "0.45"  # boundaries, references, the skip class
EXPERTS = plt.get_cmap("Set2").colors  # by index
DEVICE = plt.get_cmap("Set3").colors  # by index
DOCUMENTS = plt.get_cmap("Pastel1").colors  # by index
SIZE, SIGNED = "viridis", "RdBu_r"  # colour maps: magnitudes, and numbers of either sign
BAND = 0.25  # opacity of a band from the lowest to the highest seed


def use_style() -> None:
    """Set size, resolution and letters of all figures of a notebook."""
    plt.rcParams.update(
        {
            "figure.dpi": 90,
            "figure.figsize": (7.5, 3.2),
            "figure.constrained_layout.use": True,
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "image.interpolation": "nearest",
        }
    )
