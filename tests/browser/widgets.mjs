// What the nodes show: at most eight widgets each until advanced inputs are asked for, in both canvases; and workflows
// that were saved before (tests/fixtures/saved) open to the prompt they were saved with.
import assert from "node:assert/strict";
import { readFile, readdir } from "node:fs/promises";
import { apiPrompt, loadWorkflow, openPage } from "./comfy.mjs";
import { chosenModes, report } from "./reporting.mjs";
import { graphOf } from "./running.mjs";
import { shoot } from "./tidy.mjs";

const SAVED = new URL("../fixtures/saved/", import.meta.url);
const MOST = 8;

/**
 * Runs in the page: of each of our nodes, the widgets that a canvas shows of it. The nodes share one graph: the frontend
 * keeps values by id and name, also past `clear`, so a node with an earlier one's id takes over its values.
 */
function shownWidgets(nodes2) {
  const { app, LiteGraph } = window;
  const shown = {};
  app.graph.clear();
  for (const type of Object.keys(LiteGraph.registered_node_types).filter((name) => name.startsWith("AnyGPU"))) {
    const node = LiteGraph.createNode(type);
    app.graph.add(node);
    const inClassic = (widget) => node.isWidgetVisible(widget); // what the canvas draws
    const inNodes2 = ({ options = {} }) => !options.hidden && !options.advanced && !options.canvasOnly;
    shown[type] = (node.widgets ?? []).filter(nodes2 ? inNodes2 : inClassic).filter(({ type: kind }) => kind !== "button").map(({ name }) => name);
  }
  app.graph.clear();
  return shown;
}

async function fewWidgets({ page }, nodes2) {
  const shown = await page.evaluate(shownWidgets, nodes2);
  assert.ok(Object.keys(shown).length >= 30);
  for (const [type, widgets] of Object.entries(shown)) {
    assert.ok(widgets.length <= MOST, `${type} shows ${widgets.length}: ${widgets}`);
  }
}

/** The button shows the advanced inputs and folds them again; one that was changed stays. */
async function folds({ page }) {
  const states = await page.evaluate(() => {
    const { app, LiteGraph } = window;
    app.graph.clear();
    const node = LiteGraph.createNode("AnyGPULoadPipeline");
    app.graph.add(node);
    const count = () => [node.widgets.filter((widget) => node.isWidgetVisible(widget)).length, node.size[1]];
    const button = node.widgets.find(({ name }) => name === "anygpu_advanced");
    const seen = [count()];
    button.callback();
    seen.push(count());
    node.widgets.find(({ name }) => name === "attention").value = "native";
    button.callback();
    seen.push(count());
    return { seen, names: node.serialize().widgets_values_named, sent: node.widgets.map(({ name }) => name) };
  });
  const [[few, short], [all, tall], [then, after]] = states.seen;
  assert.ok(all > few + 10 && tall > short + 200, JSON.stringify(states.seen));
  assert.equal(then, few + 1, "a changed input stays visible");
  assert.ok(after < tall && after > short);
  assert.ok(!("anygpu_advanced" in states.names), "the button is not saved");
}

/** A small size that is typed does not become 0, which takes the default. */
async function smallStaysSmall({ page }) {
  const typed = await page.evaluate(() => {
    const { app, LiteGraph } = window;
    app.graph.clear();
    const node = LiteGraph.createNode("AnyGPUSample");
    app.graph.add(node);
    const width = node.widgets.find(({ name }) => name === "width");
    const made = [];
    for (const value of [7, 0, 700]) {
      width.value = value;
      width.callback(value, app.canvas, node, [0, 0], {});
      made.push(width.value);
    }
    return made;
  });
  assert.deepEqual(typed, [16, 0, 704]);
}

// Advanced inputs that decide what comes out: the node, its value on screen, and the first words of its tooltip.
const ASKED_FOR = {
  prepare: ["AnyGPUEncodeImage", "true", "Prepares the picture as the model's publisher does."],
  like: ["AnyGPUQueueJobs", "none", "A video or latents that AnyGPU made of this model:"],
};

/** Of the widgets of a name that Nodes 2.0 draws: label, value, whether the label is cut or something leaves the node. */
function drawnInNodes2(name) {
  const row = document.querySelector(`[data-testid="node-widget"][data-widget-name="${name}"]`);
  const label = row.querySelector('[data-testid="widget-layout-field-label"]');
  const [inner, outer] = [row, row.closest("[data-node-id]")].map((element) => element.getBoundingClientRect());
  const value = row.querySelector('[role="switch"]')?.getAttribute("aria-checked") ?? row.innerText.replace(label.innerText, "").trim();
  const outside = inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1;
  return { label: label.innerText, value, cut: label.scrollWidth > label.clientWidth, outside };
}

/** The same of the classic canvas, which draws label and value side by side on one line. */
function drawnInClassic(name) {
  const { app } = window;
  const node = app.graph._nodes.find(({ widgets }) => widgets.some((widget) => widget.name === name));
  const widget = node.widgets.find((each) => each.name === name);
  const pen = app.canvas.ctx;
  pen.font = "12px Arial"; // of the canvas; between and beside the two stand arrows and margins of 15 pixels
  const words = [widget.label ?? widget.name, String(widget.value)].map((text) => pen.measureText(text).width);
  const outside = !node.isWidgetVisible(widget) || widget.y + (widget.computedHeight ?? 20) > node.size[1];
  const tooltip = node.constructor.nodeData.input.optional[name][1].tooltip;
  return { label: widget.label ?? widget.name, value: String(widget.value), cut: words[0] + words[1] + 90 > node.size[0], outside, tooltip, pos: [node.pos[0] + node.size[0] / 3, node.pos[1] + widget.y + 10] };
}

async function askedForAreShown({ page }, nodes2) {
  await graphOf(page, Object.values(ASKED_FOR).map(([type]) => [type, {}]));
  await page.evaluate(() => {
    const { ds } = window.app.canvas;
    Object.assign(ds, { scale: 1 });
    ds.offset[0] = 120;
    ds.offset[1] = 130;
    window.app.canvas.setDirty(true, true);
  });
  for (const _ of nodes2 ? Object.keys(ASKED_FOR) : []) {
    await page.getByText("Show advanced inputs").first().click();
    await page.waitForTimeout(500);
  }
  if (!nodes2) await page.evaluate(() => window.app.graph._nodes.forEach(({ widgets }) => widgets.find(({ name }) => name === "anygpu_advanced").callback()));
  await page.waitForTimeout(1000);
  for (const [name, [, value, words]] of Object.entries(ASKED_FOR)) {
    const { tooltip, pos, ...drawn } = await page.evaluate(nodes2 ? drawnInNodes2 : drawnInClassic, name);
    assert.deepEqual(drawn, { label: name, value, cut: false, outside: false }, name);
    if (nodes2) await page.locator(`[data-widget-name="${name}"] [data-testid="widget-layout-field-label"]`).hover();
    else {
      const [x, y] = await page.evaluate(([left, top]) => window.app.canvas.ds.convertOffsetToCanvas([left, top]), pos);
      const { left, top } = await page.evaluate(() => window.app.canvas.canvas.getBoundingClientRect().toJSON());
      await page.mouse.move(left + x - 3, top + y);
      await page.mouse.move(left + x, top + y);
    }
    const shown = page.getByText(words).filter({ visible: true }).first();
    await shown.waitFor({ timeout: 20000 });
    const box = await shown.boundingBox();
    assert.ok(box.x >= 0 && box.y >= 0 && box.x + box.width <= page.viewportSize().width, `${name}: its tooltip leaves the page`);
    if (!nodes2) assert.ok((await shown.innerText()).includes(tooltip.slice(-30)), `${name}: the tooltip's end`);
    await shoot(page, nodes2, `widget_${name}`, "asked");
    await page.mouse.move(5, 500);
    await shown.waitFor({ state: "hidden" });
  }
}

async function savedOnesOpen({ page, errors }) {
  for (const file of (await readdir(SAVED)).sort()) {
    const { graph, prompt } = JSON.parse(await readFile(new URL(file, SAVED), "utf8"));
    await loadWorkflow(page, JSON.stringify(graph), file);
    const made = await apiPrompt(page);
    assert.deepEqual(Object.keys(made).sort(), Object.keys(prompt).sort(), file);
    for (const [id, { class_type: type, inputs }] of Object.entries(prompt)) {
      assert.equal(made[id].class_type, type);
      for (const [name, value] of Object.entries(inputs)) {
        assert.deepEqual(made[id].inputs[name], value, `${file}: ${type}.${name}`);
      }
    }
    assert.deepEqual(errors, [], file);
  }
}

for (const nodes2 of chosenModes()) {
  const check = report(nodes2);
  const open = await openPage({ nodes2 });
  try {
    await check("no node shows more than eight widgets", () => fewWidgets(open, nodes2));
    if (!nodes2) await check("advanced inputs fold and unfold", () => folds(open));
    await check("a small size is not taken for the default", () => smallStaysSmall(open));
    await check("prepare and like are shown with label, value and tooltip", () => askedForAreShown(open, nodes2));
    await check("workflows saved before open to the same prompt", () => savedOnesOpen(open));
    assert.deepEqual(open.errors, [], "the page reported errors");
  } finally {
    await open.browser.close();
  }
}
