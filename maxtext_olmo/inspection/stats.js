// Draws the plots of the statistics of a corpus, and answers the filter box.
"use strict";

// A filter is words of which a label has one.
function filter(text) {
  const words = text.toLowerCase().split(/[\s,]+/).filter(Boolean);
  for (const row of document.querySelectorAll("[data-label]")) {
    const label = row.dataset.label.toLowerCase();
    row.hidden = words.length > 0 && !words.some((word) => label.includes(word));
  }
}

async function start() {
  await embedPlots();
  const box = document.getElementById("filter");
  box.addEventListener("input", () => filter(box.value));
  filter(box.value);
  followColourScheme();
  document.body.dataset.drawn = "yes";
}

start();
