// The tab on a device that counts memory, the simulated accelerator: what it forecasts beside what the run took, what it
// says where a run streams, goes on in parts or cannot fit, and whether following it helps. Both canvas modes.
import assert from "node:assert/strict";
import { loadWorkflow, openPage, URL_OF_SERVER } from "./comfy.mjs";
import { notice, openTab, part, violations } from "./notices.mjs";
import { chosenModes, report } from "./reporting.mjs";
import { ended, graphOf, openTemplate, queue, shrinkPainting, source } from "./running.mjs";

const MEGA = 1e6;
const OFF_BY = 0.15; // what a forecast may be off by
const SMALL = { width: 64, height: 64, frames: 9, steps: 2, text: "a red fox", negative: "", max_tokens: 0 };

async function ask(path, body) {
  const sent = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(`${URL_OF_SERVER}${path}`, sent);
  const text = await answer.text();
  assert.ok(answer.ok, `${path}: ${answer.status} ${text}`);
  return text ? JSON.parse(text) : null;
}

/** A card with `megabytes` free and nothing of earlier runs on it; null for as many as anybody wants. */
async function card(megabytes) {
  await ask("/simulated/limit", { bytes: null });
  await ask("/free", { unload_models: true, free_memory: true });
  for (let left = 1; left > 0; await new Promise((done) => setTimeout(done, 100))) {
    left = (await ask("/simulated/memory")).allocated_bytes;
  }
  await ask("/simulated/limit", { bytes: megabytes === null ? null : megabytes * MEGA });
}

/** Set widgets of every node by name. */
const set = (page, wanted) =>
  page.evaluate((values) => {
    for (const node of window.app.graph._nodes) for (const widget of node.widgets ?? []) if (widget.name in values) widget.value = values[widget.name];
  }, wanted);

const seed = () => Date.now() % 1e9;

/** What the tab would show for the open graph, stage by stage. */
async function forecast(page) {
  const { output } = await page.evaluate(async () => window.app.graphToPrompt());
  const { forecasts } = await ask("/anygpu/graph", { prompt: output });
  return forecasts.flatMap(({ stages }) => stages);
}

/** Run the open graph to its end and return what each stage cost. */
async function costs(page) {
  await queue(page);
  const seen = await ended(page);
  assert.equal(seen.ending, "execution_success", seen.message);
  return (await ask("/anygpu/run")).costs;
}

/** The forecast of each stage is met within 15 %, with a GPU that holds everything. */
function meets(stages, spent, expected) {
  assert.deepEqual(stages.map(({ stage }) => stage), expected);
  for (const { stage, peak, fits } of stages) {
    const took = spent.find((cost) => cost.stage === stage)?.peak_bytes;
    assert.equal(fits, "fits", stage);
    assert.ok(Math.abs(peak / took - 1) <= OFF_BY, `${stage}: forecast ${peak}, took ${took}`);
  }
}

async function forecastIsMet({ page }, name, values) {
  await card(null);
  await loadWorkflow(page, await source(name), name);
  await set(page, { ...SMALL, width: 128, height: 128, frames: 17, ...values, seed: seed() });
  meets(await forecast(page), await costs(page), ["text", "sampling", "decoding"]);
}

/** Someone who never saw the pack: template, tab, forecast, run, and the tab's own table holds the figures together. */
async function strangerReads({ page }, shot) {
  await card(64);
  await openTemplate(page, "anygpu_ltx_text_to_video");
  await set(page, { ...SMALL, seed: seed() });
  await openTab(page);
  await page.getByRole("button", { name: "Refresh" }).click();
  const rows = part(page, "This graph").locator("tbody tr");
  await rows.filter({ hasText: "sampling" }).filter({ hasText: "fits" }).waitFor();
  await part(page, "This graph").getByText("ComfyUI loads, streams and evicts the weights").first().waitFor();
  await costs(page);
  const last = part(page, "Last run").locator("table").filter({ has: page.locator("th", { hasText: "peak" }) });
  for (const stage of ["text", "sampling", "decoding"]) {
    const row = last.locator("tr").filter({ has: page.locator("th", { hasText: `${stage}, comfyui` }) });
    await row.waitFor();
    const [planned, peak] = (await row.locator("td").allTextContents()).map(Number.parseFloat);
    assert.ok(Math.abs(planned / peak - 1) <= OFF_BY, `${stage}: the tab shows ${planned} and ${peak}`);
  }
  assert.deepEqual(await violations(page, ".anygpu-panel"), []);
  if (!shot) return;
  await page.locator(".anygpu-panel details").evaluateAll((all) => {
    for (const each of all) each.open = each.querySelector(":scope > summary h2")?.textContent === "This graph";
  });
  await part(page, "This graph").scrollIntoViewIfNeeded();
  await shot("panel.png");
  await openTab(page);
}

/** Room for some of the weights only: "streams", and the run stays within it. */
async function streams({ page }) {
  await card(30);
  await set(page, { ...SMALL, seed: seed() });
  const stages = await forecast(page);
  assert.deepEqual(stages.map(({ fits }) => fits), ["fits", "streams", "fits"]); // once the transformer has left, the decode fits
  await page.getByRole("button", { name: "Refresh" }).click();
  await part(page, "This graph").getByText(/^streams: weights that do not fit/).waitFor();
  for (const { stage, peak_bytes: took } of await costs(page)) {
    const { least, free } = stages.find((each) => each.stage === stage);
    assert.ok(took <= free && took >= least * (1 - OFF_BY), `${stage} took ${took} of ${free}`);
  }
}

/** Asks about the graph as it is, and holds the answer back until the function that this returns is called. */
async function heldBack(page) {
  await page.evaluate(() => {
    const own = window.fetch;
    const held = new Promise((done) => (window.release = done));
    window.asked = false;
    window.fetch = async (...given) => {
      if (!String(given[0]).includes("anygpu/graph")) return own(...given);
      window.fetch = own;
      const answer = await own(...given);
      window.asked = true;
      await held;
      return answer;
    };
  });
  await page.getByRole("button", { name: "Refresh" }).click();
  await page.waitForFunction(() => window.asked);
  return async () => {
    await page.evaluate(() => window.release());
    await page.waitForTimeout(500); // until it would be shown
  };
}

/** Advice is applied by its button, on the canvas and through a subgraph, undone by undo, and gone once followed. */
async function adviceIsApplied({ page }) {
  const loads = (input) => page.evaluate(async (name) => {
    const { output } = await window.app.graphToPrompt();
    return Object.values(output).find(({ class_type }) => class_type === "AnyGPULoadPipeline").inputs[name];
  }, input);
  const weights = () => loads("weights");
  await card(30);
  await loadWorkflow(page, await source("anygpu_ltx_text_to_video"), "anygpu_ltx_text_to_video");
  await openTab(page);
  const line = part(page, "This graph").getByText(/^weights fp8 on the load node: sampling /);
  for (const inside of [false, true]) {
    await set(page, { ...SMALL, seed: seed(), weights: "auto", offload: "auto" });
    await page.evaluate((converts) => {
      const { graph, canvas } = window.app;
      if (!converts) return;
      graph.beforeChange();
      canvas.select(graph._nodes.find(({ type }) => type === "AnyGPULoadPipeline"));
      const { subgraph } = graph.convertToSubgraph(canvas.selectedItems).node;
      const slot = subgraph._nodes[0].inputs.find(({ widget }) => widget?.name === "weights");
      subgraph.addInput("weights", slot.type).connect(slot, subgraph._nodes[0]);
      graph.afterChange();
    }, inside);
    const answered = page.waitForResponse(/anygpu\/graph/);
    await page.getByRole("button", { name: "Refresh" }).click();
    await answered;
    const late = await heldBack(page);
    await line.getByRole("button", { name: "Apply" }).click();
    assert.equal(await weights(), "fp8");
    await line.waitFor({ state: "detached" });
    await late();
    assert.equal(await line.count(), 0, "an answer about the graph before Apply replaced that about this one");
    await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.Undo"));
    await line.waitFor();
    assert.equal(await weights(), "auto", "undone");
    await page.evaluate(async () => { // what the button of an error does, but for the run
      const { app } = window;
      const { queuePrompt } = app;
      app.queuePrompt = () => {};
      (await import("/extensions/anygpu/jump.mjs")).run({ node: "AnyGPULoadPipeline", input: "offload", value: "group" });
      app.queuePrompt = queuePrompt;
    });
    assert.equal(await loads("offload"), "group", "also in a subgraph");
  }
  await set(page, { offload: "auto" });
}

/** A decode without room for all of it: "in parts", and the tab then tells which parts. */
async function stepsDown({ page }) {
  await card(30);
  await set(page, { ...SMALL, width: 256, height: 160, frames: 97, method: "auto", seed: seed() });
  const decoding = (await forecast(page)).find(({ stage }) => stage === "decoding");
  assert.equal(decoding.fits, "in parts");
  const spent = await costs(page);
  assert.ok(spent.find(({ stage }) => stage === "decoding").peak_bytes <= 30 * MEGA);
  await part(page, "Last run").getByText(/^decoded (layer by layer|in )/).waitFor();
}

/** Out of memory in sampling although everything was tried: forecast, provoked, and mended by the notice alone. */
async function noticeMends({ page }, shot) {
  await card(24); // the text needs 18
  let asked = { ...SMALL, width: 384, height: 256, frames: 97, seed: seed() };
  await set(page, asked);
  await page.getByRole("button", { name: "Refresh" }).click();
  await part(page, "This graph").getByText("too much: this will run out of memory.").waitFor();
  for (let attempt = 0; ; attempt += 1) {
    await set(page, asked);
    await queue(page);
    if ((await ended(page)).ending === "execution_success") {
      assert.ok(attempt > 0, "it never ran out of memory");
      break;
    }
    assert.ok(attempt < 5, "following the notice did not help");
    const said = await notice(page);
    assert.match(said.Found, /^out of memory while sampling \d+x\d+, \d+ frames on Simulated accelerator 0 \(/);
    if (attempt === 0) await shot?.("out_of_memory.png");
    const fewer = /lower frames from \d+ to (\d+)/i.exec(said.Lower);
    const smaller = /lower width and height from \d+x\d+ to (\d+)x(\d+)/i.exec(said.Lower);
    assert.ok(fewer || smaller, said.Lower);
    asked = { ...asked, ...(fewer ? { frames: Number(fewer[1]) } : { width: Number(smaller[1]), height: Number(smaller[2]) }) };
  }
  const [{ fits }] = (await forecast(page)).filter(({ stage }) => stage === "sampling");
  assert.notEqual(fits, "too much");
}

/** Single files: the tab tells of their pipeline as of any other. */
async function composedIsTold({ page }) {
  await card(null);
  await graphOf(page, [
    ["AnyGPUComposePipeline", { transformer: "ltx_transformer.safetensors", base: "LTX-Video" }],
    ["AnyGPUEncodePrompt", SMALL, { pipeline: [0, "pipeline"] }],
    ["AnyGPUSample", { ...SMALL, seed: seed() }, { pipeline: [0, "pipeline"], prompt: [1, "prompt"] }],
    ["AnyGPUDecode", {}, { pipeline: [0, "pipeline"], latent: [2, "latent"] }],
    ["SaveVideo", {}, { video: [3, "video"] }],
  ]);
  await page.getByRole("button", { name: "Refresh" }).click();
  await part(page, "This graph").getByRole("heading", { name: "LTX-Video: ltx_transformer.safetensors" }).waitFor();
  assert.deepEqual((await forecast(page)).map(({ stage }) => stage), ["text", "sampling", "decoding"]);
  await costs(page);
}

async function paintIsTold({ page }) {
  await card(null);
  await loadWorkflow(page, await source("anygpu_paint_v2_0"), "anygpu_paint_v2_0");
  await shrinkPainting(page);
  await set(page, { seed: seed() });
  await page.getByRole("button", { name: "Refresh" }).click();
  await part(page, "This graph").getByRole("heading", { name: /^Hunyuan3D paint: / }).waitFor();
  await part(page, "This graph").locator(".anygpu-stage").filter({ hasText: "painting" }).waitFor(); // its numbers are folded
  const stages = await forecast(page);
  const spent = await costs(page);
  for (const stage of ["delighting", "painting"]) {
    assert.ok(stages.some((each) => each.stage === stage) && spent.some((each) => each.stage === stage), stage);
  }
}

for (const nodes2 of chosenModes()) {
  const check = report(nodes2);
  const open = await openPage({ nodes2, bypassCSP: true }); // or ComfyUI forbids its own preview to read a GLB, as in paint.mjs
  const shot = check.shot(open.page);
  try {
    await check("a stranger reads in the tab what the run then takes", () => strangerReads(open, shot));
    await check("what streams is forecast and stays in its room", () => streams(open));
    await check("advice is applied by its button, and undone", () => adviceIsApplied(open));
    await check("a decode goes on in parts, forecast and told", () => stepsDown(open));
    await check("out of memory is forecast, and mended by what the notice says", () => noticeMends(open, shot));
    for (const name of ["anygpu_ltx_text_to_video", "anygpu_hunyuan_video_text_to_video"]) {
      for (const offload of ["auto", "model", "group"]) {
        await check(`${name}, offload ${offload}: the forecast is met`, () => forecastIsMet(open, name, { offload }));
      }
    }
    await check("the tab tells of single files", () => composedIsTold(open));
    await check("the tab tells of what paints", () => paintIsTold(open));
    assert.deepEqual(open.errors, [], "the page reported errors");
  } finally {
    await card(null);
    await open.browser.close();
  }
}
