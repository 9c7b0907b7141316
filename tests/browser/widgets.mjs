// What the nodes show: at most eight widgets each until advanced inputs are asked for, in both canvases; and workflows
// that were saved before (tests/fixtures/saved) open to the prompt they were saved with.
import assert from "node:assert/strict";
import { readFile, readdir } from "node:fs/promises";
import { apiPrompt, loadWorkflow, openPage } from "./comfy.mjs";
import { chosenModes, report } from "./reporting.mjs";

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
    await check("workflows saved before open to the same prompt", () => savedOnesOpen(open));
    assert.deepEqual(open.errors, [], "the page reported errors");
  } finally {
    await open.browser.close();
  }
}
