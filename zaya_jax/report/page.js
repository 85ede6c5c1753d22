"use strict";
// Draws the plots. An axis of integers has no ticks between them, however far a reader zooms in.
const figures = JSON.parse(document.getElementById("figures").textContent);
const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

function keepIntegerTicks(plot) {
  const changes = {};
  for (const letter of plot.layout.meta.integers) {
    const name = `${letter}axis`;
    const [low, high] = plot._fullLayout[name].range;
    const step = Math.abs(high - low) < 12 ? 1 : null;
    if ((plot.layout[name].dtick ?? null) !== step) changes[`${name}.dtick`] = step;
  }
  if (Object.keys(changes).length) Plotly.relayout(plot, changes);
}

document.querySelectorAll(".plot").forEach((plot, index) => {
  Plotly.newPlot(plot, { ...figures[index], config: options }).then(
    () => {
      keepIntegerTicks(plot);
      plot.on("plotly_relayout", () => keepIntegerTicks(plot));
    },
    (error) => plot.append(`This plot could not be drawn: ${error}`),
  );
});
