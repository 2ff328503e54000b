// Draws the plots of a report with BokehJS, and answers the filter box, the pointer and the keyboard.
"use strict";

const floats = (text) =>
  new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const edges = data.edges;
const bins = edges.length - 1;
const labels = data.labels;
const shares = floats(data.shares); // (bins, labels)
const epochs = floats(data.epochs); // (bins + 1, labels)
const share = (bin, label) => shares[bin * labels.length + label];
const epoch = (edge, label) => epochs[edge * labels.length + label];
const number = new Intl.NumberFormat("en");

// The labels that the filter shows; the largest have an area of their own, the others share one.
let chosen = labels.map((_, i) => i);
let cursor = null;

function drawSources() {
  const own = chosen.slice(0, data.slots - 1);
  const rest = chosen.slice(data.slots - 1);
  const areas = { x: edges, y0: edges.map(() => 0) };
  const lines = { x: edges };
  for (let slot = 0; slot < data.slots; slot++) {
    const members = slot < own.length ? [own[slot]] : slot === own.length ? rest : [];
    const weight = members.reduce((sum, label) => sum + data.available[label], 0) || 1;
    areas[`y${slot + 1}`] = edges.map((_, edge) => {
      const bin = Math.min(edge, bins - 1);
      return members.reduce((sum, label) => sum + share(bin, label), areas[`y${slot}`][edge]);
    });
    lines[`e${slot}`] = edges.map((_, edge) =>
      members.length === 0 ? NaN
        : members.reduce((s, label) => s + epoch(edge, label) * data.available[label], 0) / weight);
    const colour = slot < own.length ? data.colours[own[slot] % data.colours.length] : data.other;
    find(`area${slot}`).glyph.fill_color = { value: colour };
    find(`line${slot}`).glyph.line_color = { value: colour };
  }
  find("area0").data_source.data = areas;
  find("line0").data_source.data = lines;
}

function find(name) {
  for (const figure of Object.values(figures)) {
    const found = figure.renderers.find((renderer) => renderer.name === name);
    if (found) return found;
  }
  throw new Error(`no renderer ${name}`);
}

// A filter is a list of words, in which * and ? are wildcards. A label passes if it contains one.
function filter(text) {
  const words = text.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const tests = words.map((word) => new RegExp(
    word.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".")));
  const fits = (label) => tests.length === 0 || tests.some((test) => test.test(label.toLowerCase()));
  chosen = labels.map((_, i) => i).filter((i) => fits(labels[i]));
  for (const row of document.querySelectorAll("[data-label]")) {
    row.hidden = !fits(row.dataset.label);
  }
  const rest = chosen.length - (data.slots - 1);
  document.getElementById("count").textContent =
    `${number.format(chosen.length)} of ${number.format(labels.length)} labels`
    + (rest > 0 ? `; the ${number.format(rest)} smallest are combined in grey` : "");
  drawSources();
  readOut();
}

function readOut() {
  const target = document.getElementById("readout");
  for (const figure of Object.values(figures)) {
    const line = figure.center.find((item) => item.name === "cursor");
    line.location = cursor;
    line.visible = cursor !== null;
  }
  if (cursor === null) {
    target.textContent = "Point at a plot, or press ← and →, to read a step.";
    return;
  }
  let bin = 0;
  while (bin < bins - 1 && edges[bin + 1] <= cursor) bin++;
  const largest = [...chosen].sort((a, b) => share(bin, b) - share(bin, a)).slice(0, 8);
  const said = largest.filter((label) => share(bin, label) > 0).map((label) =>
    `${labels[label]} ${(100 * share(bin, label)).toFixed(2)} % (${epoch(bin, label).toFixed(3)} ep.)`);
  const here = data.changes.filter(([step]) => step >= edges[bin] && step < edges[bin + 1]);
  const steps = edges[bin + 1] - edges[bin] === 1 ? `Step ${number.format(edges[bin])}`
    : `Steps ${number.format(edges[bin])} to ${number.format(edges[bin + 1] - 1)}`;
  const loss = lossNear(cursor, edges[bin + 1] - edges[bin]);
  if (loss) here.unshift(loss);
  target.textContent = [`${steps}: ${said.join(", ") || "nothing that the filter shows"}`,
    ...here.map(([step, text]) => `step ${number.format(step)}: ${text}`)].join(" · ");
}

// Returns the drawn loss that is nearest to a step; null if it is a bin's width away or more.
function lossNear(step, width) {
  if (!figures.loss) return null;
  const { x, y } = find("losses").data_source.data;
  let best = 0;
  for (let i = 1; i < x.length; i++) if (Math.abs(x[i] - step) < Math.abs(x[best] - step)) best = i;
  if (x.length === 0 || Math.abs(x[best] - step) >= width) return null;
  return [x[best], `loss ${y[best].toPrecision(4)}`];
}

function zoom(factor, shift) {
  const range = figures.shares.x_range;
  const [low, high] = [range.start, range.end];
  const middle = factor === 1 || cursor === null ? (low + high) / 2 : cursor;
  const width = Math.min((high - low) * factor, edges[bins] - edges[0]);
  let start = middle - (middle - low) * (width / (high - low)) + shift * width;
  start = Math.max(edges[0], Math.min(start, edges[bins] - width));
  range.setv({ start, end: start + width });
}

function moveCursor(bins_) {
  const range = figures.shares.x_range;
  let bin = cursor === null ? (bins_ > 0 ? -1 : bins)
    : edges.findIndex((edge, i) => i === bins || edges[i + 1] > cursor);
  bin = Math.max(0, Math.min(bins - 1, bin + bins_));
  cursor = edges[bin];
  if (cursor < range.start || cursor > range.end) zoom(1, cursor < range.start ? -0.5 : 0.5);
  readOut();
}

let spike = -1;
function showSpike(by) {
  const all = document.querySelectorAll("details.spike");
  if (all.length === 0) return;
  spike = (spike + by + all.length) % all.length;
  all[spike].open = true;
  all[spike].querySelector("summary").focus();
  all[spike].scrollIntoView({ block: "start" });
  cursor = Number(all[spike].dataset.step);
  readOut();
}

const keys = {
  "/": () => document.getElementById("filter").focus(),
  "+": () => zoom(0.5, 0), "=": () => zoom(0.5, 0), "-": () => zoom(2, 0),
  "0": () => zoom(Infinity, 0),
  ArrowLeft: (event) => (event.shiftKey ? zoom(1, -0.25) : moveCursor(-1)),
  ArrowRight: (event) => (event.shiftKey ? zoom(1, 0.25) : moveCursor(1)),
  n: () => showSpike(1), p: () => showSpike(-1),
};

async function start() {
  await embedPlots();
  for (const figure of Object.values(figures)) {
    figure.on_event("mousemove", (event) => { cursor = Math.round(event.x); readOut(); });
    figure.on_event("mouseleave", () => { cursor = null; readOut(); });
  }
  const box = document.getElementById("filter");
  box.addEventListener("input", () => filter(box.value));
  filter(box.value);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.activeElement.blur();
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target instanceof HTMLInputElement) return;
    event.preventDefault();
    act(event);
  });
  followColourScheme();
  document.body.dataset.drawn = "yes";
}

start();
