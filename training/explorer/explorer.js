"use strict";

// See page.py for the data
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const length = data.tokens.length;
const isNumber = Number.isFinite;
const times = (count, make) => Array.from({ length: count }, (_, index) => make(index));
const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
const [losses, otherLosses] = data.models.map((model) => model.losses);
const differences = otherLosses?.map((loss, index) => (isNumber(loss) ? loss - losses[index] : null));
const state = {
  query: firstQuery(),
  key: null,
  colour: differences ? "difference" : "loss 0",
  quantity: Object.keys(data.quantities)[0],
  heads: firstHeads(),
};

// The page opens on the head of the first model with the clearest of two patterns, on the same head of the other model, and
// on the token with the largest loss or difference
function firstHeads() {
  const shareOf = ({ numbers }, head) => Math.max(numbers.induction?.[head] ?? 0, numbers.previous_token?.[head] ?? 0);
  const headsOf = (each, layer) => times(each.maps ? each.heads : 0, (head) => ({ layer, head, share: shareOf(each, head) }));
  const heads = data.models[0].layers.flatMap(headsOf);
  const { layer, head } = heads.sort((first, second) => second.share - first.share)[0] ?? { layer: 0, head: 0 };
  return data.models.map((model) => headNear(model, layer, head));
}

// A head by its place, or the last one of a smaller model
function headNear(model, layer, head) {
  const row = Math.min(layer, model.layers.length - 1);
  return { layer: row, head: Math.min(head, model.layers[row].heads - 1) };
}

function firstQuery() {
  const sizes = (differences ?? losses).map((value) => (isNumber(value) ? Math.abs(value) : -1));
  return sizes.indexOf(Math.max(...sizes));
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// A menu whose choice is kept in the state under its id
function addMenu(id, options, paint) {
  const menu = byId(id);
  menu.append(...options.map(([value, text]) => element("option", { value }, text)));
  menu.value = state[id];
  menu.addEventListener("change", () => {
    state[id] = menu.value;
    paint();
  });
}

function written(value) {
  if (!isNumber(value)) return "none";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 100000) ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}

const label = (name) => name.replaceAll("_", " ");

// A colour between the sheet and orange or blue, fainter behind text
function colour(value, limit, strength = "85%") {
  if (!isNumber(value) || !limit) return "transparent";
  const part = Math.min(Math.abs(value) / limit, 1) ** 0.7;
  return `color-mix(in srgb, var(--${value < 0 ? "cold" : "hot"}) calc(${part.toFixed(3)} * ${strength}), transparent)`;
}

function shown(token) {
  return token === "" ? "·" : token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

// A legend from the lowest to the highest number; `zero` has no colour
function showScale(scale, numbers, zero, unit, strength) {
  const low = Math.min(...numbers), high = Math.max(...numbers);
  const limit = Math.max(high - zero, zero - low);
  const stops = times(9, (step) => colour(low + ((high - low) * step) / 8 - zero, limit, strength));
  scale.replaceChildren(element("span", {}, written(low)), element("i", { style: `background: linear-gradient(to right, ${stops.join(", ")})` }), `${written(high)} ${unit}`);
}

function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

const selectedLayer = (index) => data.models[index].layers[state.heads[index].layer];

// Returns the selected layer of a model, and its head's weights as a function of query and key
async function readHead(index) {
  const layer = selectedLayer(index), { head } = state.heads[index];
  if (!layer.maps) return { layer, weight: null };
  const largest = new Float32Array(await unpack(layer.largest[head]));
  const levels = new Int8Array(await unpack(layer.maps[head]));
  const isLower = data.models[index].is_causal && !layer.is_cross;
  const keys = layer.is_cross ? data.source : data.tokens.slice(0, data.map_tokens);
  const lastKey = (query) => (isLower ? query : keys.length - 1);
  const weight = (query, key) => (levels[query * keys.length + key] * largest[query]) / data.levels;
  return { layer, largest, weight, keys, lastKey, isLower };
}

// Models

byId("models").before(...data.notes.map((note) => element("p", { class: "soft" }, note)));
byId("together").parentElement.hidden = data.models.length === 1;
for (const model of data.models) {
  const nats = element("abbr", { title: "-log of the probability that the model gives the token. Guessing among 1,000 tokens costs 6.9." }, "nats");
  const unit = model.is_causal ? "token" : "masked token";
  const text = element("p", { class: "soft" }, `${model.description}. Loss on this text: ${written(model.loss)} `, nats, ` per ${unit}.`);
  byId("models").append(element("div", {}, element("h2", {}, model.name), text));
}

// Text

addMenu(
  "colour",
  [
    ...(differences ? [["difference", `loss of ${data.models[1].name} minus loss of ${data.models[0].name}`]] : []),
    ...data.models.map((model, index) => [`loss ${index}`, `loss of ${model.name}`]),
    ...data.models.map((model, index) => [`attention ${index}`, `attention of the selected token, ${model.name}`]),
  ],
  paintText,
);

const addToken = (id, token, attributes) => byId(id).appendChild(element("span", { class: "token", ...attributes }, token.replaceAll("\n", "↵\n")));
const tokens = data.tokens.map((token, index) => addToken("text", token, { role: "option", onclick: () => selectQuery(index) }));
const source = data.source.map((token) => addToken("source", token));
byId("source").hidden = !source.length;
byId("text").addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: -1, ArrowUp: -10, ArrowRight: 1, ArrowDown: 10, Home: -length, End: length };
  if (event.altKey || event.ctrlKey || event.metaKey || !(event.key in steps)) return;
  event.preventDefault();
  selectQuery(state.query + steps[event.key]);
  tokens[state.query].focus();
});

function selectQuery(query, key = null) {
  state.query = clamp(query, 0, length - 1);
  state.key = key;
  paintText();
  panels.forEach((_, index) => paintPanel(index));
}

let textsPainted = 0;

async function paintText() {
  const turn = ++textsPainted, isCross = selectedLayer(0).is_cross;
  const [kind, index] = state.colour.split(" ");
  let values = kind === "loss" ? data.models[index].losses : differences, seen = [], unit = "nats; orange is worse";
  if (kind === "difference") {
    const [first, second] = data.models.map((model) => model.name);
    unit = `nats; blue: ${second} is better, orange: ${first} is better`;
  } else if (kind === "attention") {
    const { layer, weight, keys, lastKey } = await readHead(index);
    const isSeen = (key) => weight && key <= lastKey(state.query) && state.query < data.map_tokens;
    values = (keys ?? data.tokens).map((_, key) => (isSeen(key) ? weight(state.query, key) : null));
    if (layer.is_cross) [seen, values] = [values, []];
    unit = "weight";
  }
  if (turn !== textsPainted) return; // another choice meanwhile
  const numbers = [...values, ...seen].filter(isNumber);
  const limit = Math.max(...numbers.map(Math.abs), 0);
  const paint = (token, value, isKey) => {
    token.style.background = colour(value, limit, "var(--behind-text)");
    token.classList.toggle("key", isKey);
  };
  tokens.forEach((token, index) => {
    paint(token, values[index], !isCross && index === state.key);
    token.setAttribute("aria-selected", String(index === state.query));
    token.tabIndex = index === state.query ? 0 : -1;
  });
  source.forEach((token, index) => paint(token, seen[index], isCross && index === state.key));
  if (numbers.length) showScale(byId("text-scale"), [0, ...numbers], 0, unit, "var(--behind-text)");
  else byId("text-scale").replaceChildren("This head has no weights to show here.");
  const parts = [`Token ${state.query}: “${shown(data.tokens[state.query])}”`];
  for (const model of isNumber(losses[state.query]) ? data.models : []) {
    const loss = model.losses[state.query];
    parts.push(`${model.name}: loss ${written(loss)}, probability ${written(Math.exp(-loss))}`);
  }
  if (parts.length === 1) parts.push("the first token has no loss");
  else if (differences) parts.push(`difference ${written(differences[state.query])}`);
  byId("token").textContent = `${parts.join("; ")}.`;
  const box = byId("text"), top = tokens[state.query].offsetTop - box.offsetTop;
  if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 30) box.scrollTop = top - box.clientHeight / 2;
}

// Heads

addMenu("quantity", Object.keys(data.quantities).map((name) => [name, label(name)]), paintHeads);

const grids = data.models.map((model, index) => {
  const widest = Math.max(...model.layers.map((layer) => layer.heads));
  const grid = element("div", { class: "heads", role: "group", "aria-label": `Heads of ${model.name}`, style: `--rows: ${model.layers.length}; grid-template-columns: 2.75rem repeat(${widest}, minmax(0, 2.5rem))` });
  grid.append(element("span", { class: "across" }, "head"), element("span", {}, "layer"), ...times(widest, (head) => element("span", { "aria-hidden": "true" }, head)));
  const buttons = model.layers.map((layer, row) => {
    const heads = times(layer.heads, (head) => element("button", { type: "button", onclick: () => selectHead(index, row, head) }));
    grid.append(element("span", {}, layer.name), ...heads, ...times(widest - layer.heads, () => element("span")));
    return heads;
  });
  const scale = element("p", { class: "scale" });
  byId("heads").append(element("div", {}, element("h3", {}, model.name), grid, scale));
  return { buttons, scale };
});

function selectHead(index, layer, head) {
  const together = byId("together").checked;
  data.models.forEach((model, other) => {
    if (other !== index && !together) return;
    state.heads[other] = headNear(model, layer, head);
    paintPanel(other);
  });
  paintHeads();
  if (state.colour.startsWith("attention")) paintText();
}

function paintHeads() {
  byId("quantity-text").textContent = data.quantities[state.quantity];
  const all = data.models.flatMap((model) => model.layers.flatMap((layer) => layer.numbers[state.quantity] ?? [])).filter(isNumber);
  const from = Math.max(Math.min(...all), 0); // the number without colour
  const limit = Math.max(...all.map((value) => Math.abs(value - from)));
  data.models.forEach((model, index) => {
    const { buttons, scale } = grids[index], selected = state.heads[index];
    buttons.forEach((row, layer) =>
      row.forEach((button, head) => {
        const value = model.layers[layer].numbers[state.quantity]?.[head];
        const isSelected = selected.layer === layer && selected.head === head;
        button.style.background = isNumber(value) ? colour(value - from, limit) : "";
        button.classList.toggle("none", !isNumber(value));
        button.setAttribute("aria-pressed", String(isSelected));
        button.tabIndex = isSelected ? 0 : -1;
        button.title = `layer ${model.layers[layer].name}, head ${head}: ${written(value)}`;
        button.setAttribute("aria-label", button.title);
      }),
    );
    if (all.length) showScale(scale, all, from, "");
    else scale.replaceChildren("no head has it");
  });
}

// One head of each model

const panels = data.models.map((model, index) => {
  const panel = {
    title: element("h3"),
    map: element("canvas", { role: "img", "aria-label": `Attention map, ${model.name}` }),
    scale: element("p", { class: "scale" }),
    reason: element("p", { class: "soft" }),
    readout: element("p", { class: "readout", "aria-live": "polite" }),
    numbers: element("table"),
  };
  panel.map.addEventListener("click", async (event) => {
    const box = panel.map.getBoundingClientRect(), { lastKey } = await readHead(index);
    const cell = (offset, size, count) => clamp(Math.floor((offset / size) * count), 0, count - 1);
    const query = cell(event.clientY - box.top, box.height, panel.map.height);
    selectQuery(query, Math.min(cell(event.clientX - box.left, box.width, panel.map.width), lastKey(query)));
  });
  const picture = element("div", {}, panel.map, panel.scale, panel.reason, panel.readout);
  byId("panels").append(element("div", {}, panel.title, element("div", { class: "panel" }, picture, element("div", {}, panel.numbers))));
  return panel;
});

async function paintPanel(index) {
  const panel = panels[index], selected = state.heads[index];
  const read = await readHead(index), { layer, weight } = read;
  if (state.heads[index] !== selected) return; // another choice meanwhile
  panel.title.textContent = `${data.models[index].name}: layer ${layer.name}, head ${selected.head}${layer.activation && ` (${layer.activation})`}`;
  panel.map.hidden = panel.scale.hidden = !weight;
  panel.reason.textContent = weight ? "" : `No map: ${layer.missing.weights ?? "none"}.`;
  if (weight) paintMap(panel, read);
  panel.readout.textContent = weight ? describeRow(read) : "";
  const names = Object.keys(data.quantities).filter((name) => name in layer.numbers || name in layer.missing);
  panel.numbers.replaceChildren(
    ...names.map((name) => {
      const value = layer.numbers[name]?.[selected.head];
      const header = element("th", { scope: "row" }, element("abbr", { title: data.quantities[name] }, label(name)));
      return element("tr", {}, header, element("td", {}, isNumber(value) ? written(value) : (layer.missing[name] ?? "none")));
    }),
  );
}

function describeRow({ weight, keys, lastKey }) {
  if (state.query >= data.map_tokens) return `The maps of this page have the first ${data.map_tokens} tokens.`;
  const weightOf = (key) => weight(state.query, key);
  const describeKey = (key) => `${key} “${shown(keys[key])}”`;
  const query = `Query ${state.query} “${shown(data.tokens[state.query])}”`;
  if (state.key !== null && state.key < keys.length) return `Weight ${written(weightOf(state.key))} of key ${describeKey(state.key)}; ${query}.`;
  const seen = times(lastKey(state.query) + 1, (key) => key);
  const largest = seen.sort((first, second) => Math.abs(weightOf(second)) - Math.abs(weightOf(first))).slice(0, 3);
  return `${query}; largest ${largest.map((key) => `${written(weightOf(key))} of ${describeKey(key)}`).join(", ")}.`;
}

function paintMap(panel, { largest, weight, keys, lastKey, isLower }) {
  const context = panel.map.getContext("2d"), size = data.map_tokens, columns = keys.length;
  [panel.map.width, panel.map.height] = [columns, size];
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => [1, 3, 5].map((start) => parseInt(style.getPropertyValue(name).trim().slice(start, start + 2), 16));
  const [sheet, hot, cold, soft] = ["--sheet", "--hot", "--cold", "--line"].map(rgb);
  const image = context.createImageData(columns, size);
  for (let query = 0; query < size; query++) {
    for (let key = 0; key < columns; key++) {
      const value = weight(query, key);
      const part = largest[query] ? Math.min(Math.abs(value) / largest[query], 1) ** 0.6 : 0;
      const full = value < 0 ? cold : hot;
      const base = key > lastKey(query) ? soft : sheet;
      const start = 4 * (query * columns + key);
      base.forEach((ground, channel) => (image.data[start + channel] = ground + part * (full[channel] - ground)));
      image.data[start + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  const row = state.query < size ? keys.map((_, key) => weight(state.query, key)) : [];
  showScale(panel.scale, [0, ...row], 0, "in the selected row");
  if (state.query < size) {
    context.globalAlpha = 0.35;
    context.fillStyle = style.getPropertyValue("--mark");
    context.fillRect(0, state.query, lastKey(state.query) + 1, 1);
    const first = isLower ? state.key : 0;
    if (state.key !== null) context.fillRect(state.key, first, 1, size - first);
    context.globalAlpha = 1;
  }
}

paintHeads();
selectQuery(state.query);
