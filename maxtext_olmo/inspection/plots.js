// Draws plots with BokehJS, in the colours of the page; what all pages with plots share.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const figures = {}; // by name

async function embedPlots() {
  await Bokeh.embed.embed_item(data.plots);
  for (const figure of Bokeh.documents[0].roots()[0].children) figures[figure.name] = figure;
}

function restyle(dark) {
  const [text, line] = dark ? ["#e4e6ea", "#3a3e45"] : ["#1c1e21", "#d5d8dc"];
  for (const figure of Object.values(figures)) {
    figure.title.text_color = text;
    figure.outline_line_color = line;
    for (const axis of [...figure.below, ...figure.left]) {
      Object.assign(axis, { axis_label_text_color: text, major_label_text_color: text,
        axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null });
    }
    for (const item of figure.center) {
      if (item.type === "Grid") item.grid_line_color = line;
      else if (item.name === "change") item.line_color = text;
      else if (item.name === "cursor") item.line_color = text;
      else if (item.name === "number") item.text_color = text;
      else if (item.type === "Legend") item.label_text_color = text;
    }
  }
}

// Follows the colour scheme of the browser; a printed page is light, and shows all details.
function followColourScheme() {
  const dark = matchMedia("screen and (prefers-color-scheme: dark)");
  dark.addEventListener("change", () => restyle(dark.matches));
  addEventListener("beforeprint", () => {
    restyle(false);
    // Now, because the next frame comes after the page has been printed.
    for (const view of [...Bokeh.index.roots][0].child_views) view.paint();
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
  addEventListener("afterprint", () => restyle(dark.matches));
  restyle(dark.matches);
}
